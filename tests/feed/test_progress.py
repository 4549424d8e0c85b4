"""How far an epoch is, in the loader's own bar and in those of others."""

import re
from typing import Any

import numpy as np
import pytest
from rich.progress import track
from tqdm import tqdm

from penstock import ArraySource, Loader, Plan, Shuffle, World
from penstock.files import progress


def make(rank: int = 0, size: int = 1) -> Loader:
    source = ArraySource({"x": np.arange(40)})
    return Loader(source, Plan(source.index, Shuffle(), batch_size=4, seed=3), world=World(rank, size))


@pytest.fixture
def always_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_EVERY_SECONDS", {True: 0.0, False: 0.0})


def read(batches: Any) -> list[list[int]]:
    return [batch["x"].tolist() for batch in batches]


def test_bars_of_others_know_the_length_and_change_nothing() -> None:
    with make() as plain, make() as under_tqdm, make() as under_rich:
        bar = tqdm(under_tqdm, disable=False, mininterval=1e9)
        wanted = read(plain)
        assert bar.total == len(under_rich) == 10
        assert read(bar) == wanted
        assert bar.n == 10
        assert read(track(under_rich, disable=True)) == wanted


@pytest.mark.usefixtures("always_shown")
def test_progress_yields_the_batches_and_counts_on_after_a_resume(capsys: pytest.CaptureFixture[str]) -> None:
    with make() as plain, make() as loader, make() as resumed:
        wanted = read(plain)
        for batch in loader.progress():
            state = loader.state_dict()
            if batch["x"].tolist() == wanted[3]:
                break
        capsys.readouterr()
        resumed.load_state_dict(state)
        assert read(resumed.progress()) == wanted[4:]
        counts = re.findall(r"Epoch 0: (\d+) of 10 batches", capsys.readouterr().err)
        assert counts == ["5", "6", "7", "8", "9", "10", "10"]
        assert read(resumed.progress("train")) != wanted
        assert "train: 1 of 10 batches (10%)" in capsys.readouterr().err


@pytest.mark.usefixtures("always_shown")
def test_other_ranks_and_show_false_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with make(1, 2) as other, make() as silent:
        assert len(read(other.progress())) == 5
        assert len(read(silent.progress(show=False))) == 10
    assert capsys.readouterr().err == ""
