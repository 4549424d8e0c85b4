"""The same seed gives the same chunks and the same batches: in a new process, and after a resume at any chunk."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_test_parts import own_threads, read_answer, start_script

from penstock import ResumeError
from penstock.recipes.streams import PipelineChunkLoader, RandomChunkLoader, sample_batch_within_chunk

TOTAL, SIZE, CHUNKS = 1000, 70, 5
PARTITION = {"coverage": "partition", "align": 10}
KINDS: dict[str, dict[str, Any]] = {"random": {}, "aligned": {"time_units": 7}, "partition": PARTITION}


def load(start: int, stop: int) -> np.ndarray:
    return np.arange(start, stop, dtype=np.float64)[:, None]


def stream(seed: int = 3, **options: Any) -> RandomChunkLoader:
    return RandomChunkLoader(load, TOTAL, SIZE, "cpu", seed=seed, **options)


def start(loader: RandomChunkLoader) -> None:
    loader.start_epoch(None if loader.state_dict()["coverage"] == "partition" else CHUNKS)


def seen(chunk: Any) -> Any:
    """Return where a chunk lies and two batches within it."""
    batches = [sample_batch_within_chunk(chunk[0], batch_size=6, total_steps=2)[0].tolist() for _ in range(2)]
    return [chunk.start, chunk.stop, chunk.index, batches]


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
def test_the_same_seed_gives_the_same_chunks_and_batches_for_any_prefetch(kind: str) -> None:
    found = []
    for prefetch in (1, 2, 7):
        with stream(prefetch=prefetch, **KINDS[kind]) as loader:
            found.append(epochs(loader, 3))
    assert found[0] == found[1] == found[2]
    assert found[0][0] != found[0][1] != found[0][2]


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


def test_no_seed_is_seed_zero() -> None:
    with stream(None) as loader, stream(0) as other:  # type: ignore[arg-type]
        assert epochs(loader, 1) == epochs(other, 1)


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
    text = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}){NEW_PROCESS}"
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_taken_after_any_chunk_goes_on_with_the_chunks_and_batches_that_were_left(kind: str) -> None:
    with stream(**KINDS[kind]) as loader:
        whole = epochs(loader, 3)
    for done in range(len(whole[1]) + 1):
        with stream(prefetch=2, **KINDS[kind]) as loader:
            epochs(loader, 1)
            start(loader)
            for _ in range(done):
                loader.get_next_chunk()
            state = json.loads(json.dumps(loader.state_dict()))
        with stream(prefetch=1 + done % 5, **KINDS[kind]) as resumed:
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            # An epoch that was delivered whole has no rest: what comes is the next one.
            left = [whole[1][done:], whole[2]] if done < len(whole[1]) else [whole[2]]
            assert epochs(resumed, len(left)) == left


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


def test_an_epoch_with_fewer_chunks_than_were_delivered_has_no_rest() -> None:
    with stream() as loader:
        loader.load_state_dict({**loader.state_dict(), "chunk": 4})
        loader.start_epoch(3)
        assert rest(loader) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"seed": 4}, "seed=3, here 4"),
        ({"total": 999}, "total_timesteps=1000, here 999"),
        ({"size": 71}, "chunk_size=70, here 71"),
        ({"time_units": 2}, "align=1, here 2"),
        ({"coverage": "partition"}, "coverage='random', here 'partition'"),
    ],
)
def test_a_state_of_another_stream_is_refused(changed: dict[str, Any], words: str) -> None:
    options = {"total": TOTAL, "size": SIZE, "seed": 3} | changed
    total, size = options.pop("total"), options.pop("size")
    with stream() as loader, RandomChunkLoader(load, total, size, "cpu", **options) as other:
        with pytest.raises(ResumeError, match=words):
            other.load_state_dict(loader.state_dict())


@pytest.mark.parametrize("damage", [{"version": 2}, {"epoch": -1}, {"chunk": None}, {"chunk": 1.5}])
def test_a_state_that_is_damaged_is_refused(damage: dict[str, Any]) -> None:
    with stream() as loader:
        with pytest.raises(ResumeError, match=next(iter(damage))):
            loader.load_state_dict({**loader.state_dict(), **damage})
        with pytest.raises(ResumeError, match="version=None"):
            loader.load_state_dict({})


def test_a_pipeline_goes_on_in_the_middle_of_its_list() -> None:
    chunks = [(0, 5), (20, 29), (7, 11), (40, 90)]

    def walk(loader: PipelineChunkLoader, count: int) -> list[Any]:
        found = []
        for _ in range(count):
            begin, chunk = loader.get_next_chunk()
            if begin is not None:
                found.append(seen(chunk))
        return found

    with PipelineChunkLoader(load, "cpu", seed=8) as loader:
        loader.start_epoch(chunks)
        whole = walk(loader, 5)
    assert [entry[:2] for entry in whole] == [list(chunk) for chunk in chunks]
    for done in range(4):
        with PipelineChunkLoader(load, "cpu", seed=8) as loader:
            loader.start_epoch(chunks)
            walk(loader, done)
            state = json.loads(json.dumps(loader.state_dict()))
        with PipelineChunkLoader(load, "cpu", prefetch=3, seed=8) as loader:
            loader.load_state_dict(state)
            loader.start_epoch(chunks)
            assert walk(loader, 5) == whole[done:]
    with PipelineChunkLoader(load, "cpu", seed=9) as loader, pytest.raises(ResumeError, match="seed=8, here 9"):
        loader.load_state_dict(state)
