"""The checkpoint file of a loader: saved on time, always whole, and resumed from, also after a kill."""

import json
import os
import signal
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import penstock_test_shards
import pytest
import torch
from penstock_test_parts import exit_code
from penstock_test_shards import ORDERS, error_in_torchs_worker, xs

from penstock import OptionError, ResumeError
from penstock.recipes.webdataset import ResumableWebDatasetLoader, WebDatasetLoader

N, SHARD = 13, 4  # three shards of 4 and one of 1
no_launcher, sets = penstock_test_shards.no_launcher, penstock_test_shards.sets


@pytest.mark.parametrize("max_workers", [None, 2])
@pytest.mark.parametrize("order", ["window", "all"])
def test_a_loader_that_is_made_again_goes_on_after_every_k(
    sets: Callable[..., Path], tmp_path: Path, order: str, max_workers: int | None
) -> None:
    whole = xs(WebDatasetLoader(sets(), **ORDERS[order]))
    for k in range(1, N + 1):
        path = tmp_path / f"{k}.json"
        first = ResumableWebDatasetLoader(sets(), path, 1, max_workers=max_workers, **ORDERS[order])
        samples = iter(first)
        assert xs(islice(samples, k)) == whole[:k]
        first.close()
        second = ResumableWebDatasetLoader(sets(), path, 1, **ORDERS[order])
        assert xs(second) == whole[k:]
        second.close()


@pytest.mark.parametrize("interval", [1, 3, 5, 13, 14])
def test_checkpoints_are_saved_when_they_are_due_and_at_the_end(
    sets: Callable[..., Path], tmp_path: Path, interval: int
) -> None:
    path = tmp_path / "c.json"
    loader = ResumableWebDatasetLoader(sets(), path, interval)
    places = [json.loads(path.read_bytes())["batch"] if path.exists() else 0 for _ in loader]
    assert places == [k // interval * interval for k in range(1, N + 1)]
    state = json.loads(path.read_bytes())
    assert (state["epoch"], state["batch"]) == (1, 0)


def test_the_interval_goes_on_counting_after_a_resume(sets: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    first = ResumableWebDatasetLoader(sets(), path, 5)
    list(islice(first, 7))
    second = ResumableWebDatasetLoader(sets(), path, 5)
    assert {json.loads(path.read_bytes())["batch"] for _ in second} == {5, 10}


def test_several_epochs_are_counted(sets: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    whole = WebDatasetLoader(sets())
    epochs = [xs(whole) for _ in range(3)]
    loader = ResumableWebDatasetLoader(sets(), path, 4)
    assert [xs(loader), xs(islice(loader, 9))] == [epochs[0], epochs[1][:9]]
    again = ResumableWebDatasetLoader(sets(), path, 4)
    assert [xs(again), xs(again)] == [epochs[1][8:], epochs[2]]


def test_the_checkpoint_holds_the_seeds_two_keys_and_where_exactly(sets: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "c.json"
    list(islice(ResumableWebDatasetLoader(sets(), path, 6), 6))
    state = json.loads(path.read_bytes())
    assert {"shard_idx": 1, "sample_offset": 2, "epoch": 0, "batch": 6}.items() <= state.items()
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"{", b"\x00\x01", b'{"shard_idx": 0, "sample_off'], ids=repr)
def test_a_checkpoint_that_is_damaged_is_named_with_what_to_do(
    sets: Callable[..., Path], tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with pytest.raises(ResumeError, match=r"Could not read the checkpoint .*c\.json: .*Remove it"):
        ResumableWebDatasetLoader(sets(), path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "content", [b"[]", b"3", b"null", b'{"model": "weights"}', b'{"shard_idx": 9, "sample_offset": 0}']
)
def test_a_checkpoint_of_something_else_is_refused(sets: Callable[..., Path], tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with pytest.raises(ResumeError) as caught:
        ResumableWebDatasetLoader(sets(), path)
    assert "c.json" in f"{caught.value} {getattr(caught.value, '__notes__', '')}"
    assert path.read_bytes() == content


def test_a_checkpoint_of_another_seed_or_set_is_refused(sets: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    list(islice(ResumableWebDatasetLoader(sets(), path, 3), 3))
    for folder, options, message in (
        (sets(), {"seed": 1}, "seed changed from 42 to 1"),
        (sets(offset=1), {}, "the data"),
        (sets(), {"buffer_size": 4}, "order"),
    ):
        with pytest.raises(ResumeError, match=message) as caught:
            ResumableWebDatasetLoader(folder, path, **options)
        assert any("c.json" in note for note in caught.value.__notes__)


def test_a_checkpoint_of_the_origin_is_resumed(sets: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"shard_idx": 1, "sample_offset": 2}')
    assert xs(ResumableWebDatasetLoader(sets(), path)) == xs(WebDatasetLoader(sets()))[6:]


def test_without_a_file_nothing_is_saved(
    sets: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loader = ResumableWebDatasetLoader(sets(), checkpoint_interval=1)
    assert sorted(xs(loader)) == list(range(N))
    assert list(tmp_path.iterdir()) == []
    for use in (loader.save_checkpoint, loader.load_checkpoint):
        with pytest.raises(OptionError, match="checkpoint_path"):
            use()


@pytest.mark.parametrize("interval", [0, -1, 1.5])
def test_an_interval_that_cannot_be_is_refused(sets: Callable[..., Path], tmp_path: Path, interval: Any) -> None:
    with pytest.raises(OptionError, match="checkpoint_interval must be an integer >= 1, got "):
        ResumableWebDatasetLoader(sets(), tmp_path / "c.json", interval)


def test_saving_and_loading_by_hand(sets: Callable[..., Path], tmp_path: Path) -> None:
    loader = ResumableWebDatasetLoader(sets(), tmp_path / "c.json")
    samples = iter(loader)
    list(islice(samples, 6))
    loader.save_checkpoint()
    rest = xs(samples)
    loader.save_checkpoint()
    again = ResumableWebDatasetLoader(sets(), tmp_path / "c.json")
    assert xs(again) != rest
    samples = iter(loader)
    list(islice(samples, 2))
    loader.load_checkpoint()
    assert len(xs(loader)) == N


def test_a_reader_of_the_file_never_sees_half_of_it(sets: Callable[..., Path], tmp_path: Path) -> None:
    path, done, torn = tmp_path / "c.json", threading.Event(), []

    def look() -> None:
        while not done.is_set():
            if path.exists():
                content = path.read_bytes()
                try:
                    json.loads(content)
                except ValueError:
                    torn.append(content)

    looking = threading.Thread(target=look)
    looking.start()
    loader = ResumableWebDatasetLoader(sets(), path, 1)
    for _ in range(5):
        list(loader)
    done.set()
    looking.join()
    assert torn == []


def test_resuming_in_torchs_worker_processes_is_refused(sets: Callable[..., Path], tmp_path: Path) -> None:
    dataset = ResumableWebDatasetLoader(sets(), tmp_path / "c.json", 1)
    assert "create_webdataset_dataloader() and its state_dict()" in error_in_torchs_worker(dataset)
    assert not (tmp_path / "c.json").exists()


def test_without_a_file_torchs_worker_processes_are_fine(sets: Callable[..., Path]) -> None:
    dataset = ResumableWebDatasetLoader(sets())
    assert sorted(xs(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2))) == list(range(N))


@pytest.mark.parametrize("name", ["shuffle", "verify", "checkpoint_interval"])
def test_an_unknown_option_is_named_with_the_nearest(sets: Callable[..., Path], name: str) -> None:
    with pytest.raises(OptionError, match=rf"got {name}_\. Did you mean '{name}'\?"):
        ResumableWebDatasetLoader(sets(), **{f"{name}_": 3})


def training(folder: Path, checkpoint: Path, log: Path, stop: int) -> None:
    loader = ResumableWebDatasetLoader(folder, checkpoint, 2)
    with log.open("a", buffering=1) as out:
        for count, sample in enumerate(loader, start=1):
            out.write(f"{int(sample['x'])}\n")
            if count == stop:
                os.kill(os.getpid(), signal.SIGKILL)


def test_a_training_that_is_killed_again_and_again_sees_every_sample(sets: Callable[..., Path], tmp_path: Path) -> None:
    log, checkpoint = tmp_path / "log", tmp_path / "checkpoint.json"
    for stop in (5, 4, 0):  # killed after the fifth sample, saved after the fourth; and so on
        assert exit_code(training, sets(), checkpoint, log, stop) == (-signal.SIGKILL if stop else 0)
    whole = xs(WebDatasetLoader(sets()))
    assert list(map(int, log.read_text().split())) == [*whole[:5], *whole[4:8], *whole[8:]]
