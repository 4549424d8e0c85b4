"""The same seed gives the same chunks and the same batches: in a new process, and after a resume at any chunk."""

import json
from pathlib import Path
from typing import Any

import pytest
from penstock_test_parts import own_threads, read_answer, start_script

from penstock import OptionError, ResumeError
from penstock.plan.world import World
from penstock.recipes.streams import RandomChunkLoader
from tests.suites.loaders import STREAMS as KINDS
from tests.suites.loaders import load_rows as load
from tests.suites.loaders import seen

TOTAL, SIZE, CHUNKS = 1000, 70, 5
PARTITION = {"coverage": "partition", "align": 10}


def stream(seed: int = 3, **options: Any) -> RandomChunkLoader:
    return RandomChunkLoader(load, TOTAL, SIZE, "cpu", seed=seed, **options)


def start(loader: RandomChunkLoader) -> None:
    loader.start_epoch(None if loader.state_dict()["coverage"] == "partition" else CHUNKS)


def rest(loader: RandomChunkLoader) -> list[Any]:
    found = []
    while (chunk := loader.get_next_chunk())[0] is not None:
        found.append(seen(chunk))
    return found


def epochs(loader: RandomChunkLoader, count: int) -> list[list[Any]]:
    found = []
    for _ in range(count):
        start(loader)
        found.append(rest(loader))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_gives_other_chunks_and_other_batches(kind: str) -> None:
    found = []
    for seed in (0, 1, 2, 10**12):
        with stream(seed, **KINDS[kind]) as loader:
            found.append(epochs(loader, 1)[0])
    for place in (0, 3):
        assert len({json.dumps([entry[place] for entry in chunks]) for chunks in found}) == 4


def test_every_chunk_of_every_epoch_has_batches_of_its_own_though_it_is_the_same_window() -> None:
    with RandomChunkLoader(load, 60, SIZE, "cpu", seed=3) as loader:
        found = [entry for chunks in epochs(loader, 4) for entry in chunks]
    assert {tuple(entry[:2]) for entry in found} == {(0, 60)}
    assert len({json.dumps(entry[3]) for entry in found}) == len(found) == 4 * CHUNKS


NEW_PROCESS = """
import json, sys
import numpy as np
import penstock as ps
from test_resume import KINDS, epochs, stream
found = {}
for kind, options in KINDS.items():
    with stream(**options) as loader:
        found[kind] = epochs(loader, 2)
print(json.dumps(found))
"""


def test_a_new_process_sees_the_same_chunks_and_batches(tmp_path: Path) -> None:
    here = {}
    for kind, options in KINDS.items():
        with stream(**options) as loader:
            here[kind] = epochs(loader, 2)
    places = [str(Path(__file__).parent), str(Path(__file__).parents[3])]
    text = f"import sys; sys.path[:0] = {places!r}{NEW_PROCESS}"
    with start_script(tmp_path, text, env={"PYTHONHASHSEED": "77"}) as process:
        assert read_answer(process) == here


def test_the_chunks_of_a_seed_are_these() -> None:
    """Changing them is a breaking change."""
    with stream() as loader:
        assert [entry[:2] for entry in epochs(loader, 1)[0]] == GOLDEN_RANDOM
    with stream(**PARTITION) as loader:
        assert [entry[:2] for entry in epochs(loader, 1)[0]] == GOLDEN_PARTITION


GOLDEN_RANDOM = [[206, 276], [467, 537], [223, 293], [739, 809], [147, 217]]
GOLDEN_PARTITION = [
    [460, 530],
    [250, 320],
    [0, 40],
    [600, 670],
    [40, 110],
    [740, 810],
    [110, 180],
    [950, 1000],
    [880, 950],
    [810, 880],
    [180, 250],
    [390, 460],
    [320, 390],
    [670, 740],
    [530, 600],
]


def test_loading_a_state_ends_the_epoch_that_runs() -> None:
    with stream() as loader:
        whole = epochs(loader, 2)
        start(loader)
        loader.get_next_chunk()
        loader.load_state_dict({**loader.state_dict(), "epoch": 0, "chunk": 2})
        assert own_threads() == []
        assert epochs(loader, 2) == [whole[0][2:], whole[1]]


def test_a_state_is_kept_until_something_of_its_epoch_was_delivered() -> None:
    with stream() as loader:
        whole = epochs(loader, 1)[0]
        loader.load_state_dict({**loader.state_dict(), "epoch": 0, "chunk": 2})
        loader.start_epoch(3)
        loader.start_epoch(4)  # another number of chunks, before any came
        loader.cleanup()
        loader.start_epoch(CHUNKS)
        assert rest(loader) == whole[2:]


def test_a_state_taken_without_an_epoch_is_where_the_next_one_begins() -> None:
    with stream() as loader:
        assert (loader.state_dict()["epoch"], loader.state_dict()["chunk"]) == (0, 0)
        start(loader)
        loader.get_next_chunk()
        loader.cleanup()
        assert (loader.state_dict()["epoch"], loader.state_dict()["chunk"]) == (1, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_share_the_windows_of_one_order(kind: str) -> None:
    whole = epochs(stream(**KINDS[kind]), 2)
    for ranks in (2, 5):
        shares = [epochs(stream(world=World(rank, ranks), **KINDS[kind]), 2) for rank in range(ranks)]
        for epoch, expected in enumerate(whole):
            steps = zip(*(share[epoch] for share in shares), strict=True)
            found = [chunk for step in steps for chunk in step]
            assert found == expected[: len(expected) // ranks * ranks]
            assert found


def test_ranks_resume_at_the_same_chunk_with_another_number_of_ranks() -> None:
    loader = stream(world=World(1, 2))
    start(loader)
    loader.get_next_chunk()
    state = loader.state_dict()
    loader.cleanup()
    assert state["chunk"] == 2  # one on each rank
    whole = epochs(stream(), 1)[0]
    resumed = stream(world=World())
    resumed.load_state_dict(state)
    assert epochs(resumed, 1) == [whole[2:]]


def test_chunks_that_ranks_cannot_share_are_named(caplog: pytest.LogCaptureFixture) -> None:
    epochs(stream(world=World(0, 2)), 1)
    assert "1 of 5 chunks are left out, because 2 ranks cannot share them equally" in caplog.text
    with pytest.raises(OptionError, match="num_chunks must be an integer >= 6, got 5"):
        start(stream(world=World(0, 6)))
    with pytest.raises(OptionError, match="seed must be an integer, the same on all 2 ranks, got None"):
        RandomChunkLoader(load, TOTAL, SIZE, "cpu", world=World(0, 2))


def test_without_a_seed_windows_differ_and_the_state_has_the_seed() -> None:
    one, other = (RandomChunkLoader(load, TOTAL, SIZE, "cpu") for _ in range(2))
    whole = epochs(one, 2)
    assert whole != epochs(other, 2)
    seed = one.state_dict()["seed"]
    assert epochs(stream(seed), 2) == whole
    start(other)
    other.get_next_chunk()
    state = json.loads(json.dumps(other.state_dict()))
    left = rest(other)
    resumed = RandomChunkLoader(load, TOTAL, SIZE, "cpu")
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert epochs(resumed, 1) == [left]
    with pytest.raises(ResumeError, match="chunk_size=70, here 71"):
        RandomChunkLoader(load, TOTAL, 71, "cpu").load_state_dict(state)


def test_an_epoch_of_no_more_chunks_than_were_delivered_is_refused() -> None:
    with stream() as loader:
        loader.start_epoch(6)
        whole = [seen(loader.get_next_chunk()) for _ in range(4)]
        state = loader.state_dict()
        whole += rest(loader)
    with stream() as loader:
        loader.load_state_dict(state)
        for chunks in (3, 4):
            with pytest.raises(OptionError, match=f"more than the 4 chunks that were delivered .* got {chunks}"):
                loader.start_epoch(chunks)
        loader.start_epoch(6)
        assert rest(loader) == whole[4:]
