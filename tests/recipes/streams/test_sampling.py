"""Batches within a chunk: bounds, connectivity, reproducibility; and the numbers that a loop of chunks needs."""

import gc
import io
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock import OptionError
from penstock.recipes.streams import (
    ChunkLatencyStats,
    RandomChunkLoader,
    calculate_chunk_params,
    compute_neuron_phases,
    generate_random_chunks,
    sample_batch_indices,
    sample_batch_within_chunk,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def connectivities(draw: st.DrawFn) -> list[list[int]]:
    """Return, for each neuron, whom it listens to."""
    n = draw(st.integers(1, 12))
    return [draw(st.lists(st.integers(0, n - 1), max_size=n)) for _ in range(n)]


def csr(inputs: list[list[int]]) -> dict[str, torch.Tensor]:
    return {
        "wmat_indices": torch.tensor([n for row in inputs for n in row], dtype=torch.int64),
        "wmat_indptr": torch.tensor(np.cumsum([0, *map(len, inputs)]), dtype=torch.int64),
    }


# -- sample_batch_within_chunk -----------------------------------------------------------------------------------------


@given(inputs=connectivities(), count=st.integers(1, 6), seed=st.integers(0, 1000))
def test_needed_are_the_selected_neurons_and_those_they_listen_to(
    inputs: list[list[int]], count: int, seed: int
) -> None:
    chunk = torch.zeros(9, len(inputs))
    _, selected, needed = sample_batch_within_chunk(
        chunk, **csr(inputs), batch_size=4, total_steps=3, num_neurons_to_zero=count, generator=generator(seed)
    )
    assert selected.shape == (count,)
    wanted = set(selected.tolist()) | {n for neuron in selected.tolist() for n in inputs[neuron]}
    assert needed.tolist() == sorted(wanted)
    assert selected.dtype == needed.dtype == torch.int64


def test_all_neurons_are_selected_equally_often_with_replacement() -> None:
    inputs: list[list[int]] = [[] for _ in range(5)]
    _, selected, _ = sample_batch_within_chunk(
        torch.zeros(9, 5), **csr(inputs), num_neurons_to_zero=2000, generator=generator()
    )
    assert torch.bincount(selected).min() > 300
    assert len(torch.bincount(selected)) == 5


def test_without_neurons_to_leave_out_nothing_is_needed() -> None:
    batch, selected, needed = sample_batch_within_chunk(torch.zeros(9, 5), batch_size=4, total_steps=3)
    assert [(part.tolist(), part.dtype) for part in (selected, needed)] == [([], torch.int64)] * 2
    assert (batch.shape, batch.dtype) == ((4,), torch.int64)


@pytest.mark.parametrize(("frames", "steps"), [(9, 3), (4, 3), (2, 1), (5, 0), (1, 0)])
def test_first_frames_reach_to_the_last_one_that_leaves_room_for_all_steps(frames: int, steps: int) -> None:
    batch, *_ = sample_batch_within_chunk(
        torch.zeros(frames, 2), batch_size=500, total_steps=steps, generator=generator()
    )
    # Frames i to i + steps are used: the last legal i is frames - steps - 1.
    assert set(batch.tolist()) == set(range(frames - steps))


@pytest.mark.parametrize("steps", [4, 5])
def test_a_chunk_that_is_too_short_is_a_value_error(steps: int) -> None:
    with pytest.raises(ValueError, match=rf"more than total_steps={steps} frames, got 4"):
        sample_batch_within_chunk(torch.zeros(4, 2), batch_size=2, total_steps=steps)


def test_neurons_to_leave_out_need_the_connectivity() -> None:
    with pytest.raises(OptionError, match="wmat_indices"):
        sample_batch_within_chunk(torch.zeros(4, 2), num_neurons_to_zero=1)


def test_all_arguments_may_be_positional() -> None:
    weights = csr([[1], [0]])
    found = sample_batch_within_chunk(
        torch.zeros(9, 2), torch.zeros(9, 1), weights["wmat_indices"], weights["wmat_indptr"], 4, 3, 2, "cpu"
    )
    assert [len(part) for part in found[:2]] == [4, 2]


def chunk_of(seed: int, arrays: int = 1) -> Any:
    with RandomChunkLoader(lambda a, b: [np.zeros((b - a, 3))] * arrays, 1000, 100, "cpu", seed=seed) as loader:
        loader.start_epoch(1)
        return loader.get_next_chunk()


def batches_of(chunk: Any, count: int = 3) -> list[list[int]]:
    return [sample_batch_within_chunk(chunk[0], batch_size=8, total_steps=3)[0].tolist() for _ in range(count)]


def test_a_chunk_draws_its_own_batches_whatever_the_global_generators_do() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = batches_of(chunk_of(7))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    random.seed(3)
    assert batches_of(chunk_of(7)) == first
    assert batches_of(chunk_of(8)) != first
    assert len({tuple(batch) for batch in first}) == 3


def test_a_generator_that_is_given_comes_before_the_one_of_the_chunk() -> None:
    chunk = chunk_of(7)
    found = [sample_batch_within_chunk(chunk[0], batch_size=8, generator=generator(5))[0].tolist() for _ in range(2)]
    plain = sample_batch_within_chunk(torch.zeros(100, 3), batch_size=8, generator=generator(5))[0].tolist()
    assert found == [plain, plain]


def test_both_tensors_of_a_chunk_and_the_chunk_itself_have_one_generator() -> None:
    direct = torch.Generator().manual_seed(chunk_of(7).generator.initial_seed())
    wanted = [torch.randint(0, 97, (8,), generator=direct).tolist() for _ in range(3)]
    data, stim = chunk_of(7, arrays=2)  # the chunk itself is gone
    found = [sample_batch_within_chunk(some, batch_size=8, total_steps=3)[0].tolist() for some in (data, stim, data)]
    assert found == wanted


def test_a_generator_belongs_to_the_tensors_of_its_chunk_and_to_no_others() -> None:
    chunk = chunk_of(7)
    assert vars(chunk[0]) == {}  # a tensor of the user's: nothing is planted on it
    for other in (chunk[0].clone(), chunk[0][:], torch.zeros(100, 3)):
        torch.manual_seed(1)
        first = batches_of([other])
        torch.manual_seed(1)
        assert batches_of([other]) == first


def test_a_generator_is_gone_with_its_chunk() -> None:
    chunk = chunk_of(7)
    alive = weakref.ref(chunk.generator)
    data = chunk[0]
    del chunk
    gc.collect()
    assert alive() is not None
    del data
    gc.collect()
    assert alive() is None


# -- the numbers of a loop ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_numbers", "found"),
    [
        ((967_680, 65_536, 256, 1), (14, 256, 3584)),  # 3780 batches would need 14.77 chunks
        ((1000, 300, 32, 1), (3, 9, 27)),
        ((1000, 300, 32, 4), (13, 9, 117)),
        ((1000, 2000, 32, 3), (3, 31, 93)),  # a chunk larger than the data: one per pass
        ((1000, 1000, 32, 3), (3, 31, 93)),
        ((10, 1, 1, 1), (10, 1, 10)),
        ((7, 7, 7, 1), (1, 1, 1)),
    ],
)
def test_batches_per_epoch_is_what_the_loop_really_runs(given_numbers: tuple[int, ...], found: tuple[int, ...]) -> None:
    assert calculate_chunk_params(*given_numbers) == found
    assert found[0] * found[1] == found[2]


@given(total=st.integers(1, 5000), size=st.integers(1, 5000), batch=st.integers(1, 5000), passes=st.integers(1, 5))
def test_an_epoch_has_chunks_and_batches_or_the_numbers_are_refused(
    total: int, size: int, batch: int, passes: int
) -> None:
    if batch > min(size, total):
        with pytest.raises(ValueError, match="batch_size must be <= the"):
            calculate_chunk_params(total, size, batch, passes)
    else:
        chunks, per_chunk, per_epoch = calculate_chunk_params(total, size, batch, passes)
        assert min(chunks, per_chunk) >= 1
        assert 0 < per_epoch * batch <= total * passes


@pytest.mark.parametrize("bad", [(0, 1, 1, 1), (10, 0, 1, 1), (10, 5, 0, 1), (10, 5, 1, 0), (10, 5, 1, 1.0)])
def test_numbers_that_cannot_be_are_a_value_error(bad: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="must be an integer >= 1"):
        calculate_chunk_params(*bad)


def test_random_chunks_begin_at_multiples_and_end_within_the_data() -> None:
    chunks = generate_random_chunks(103, 20, 2000, time_units=8, seed=4)
    assert {start for start, _ in chunks} == set(range(0, 84, 8))
    assert {stop - start for start, stop in chunks} == {20}
    assert generate_random_chunks(5, 20, 3) == [(0, 5)] * 3


def test_random_chunks_depend_on_seed_and_epoch_or_on_the_generator_that_is_given() -> None:
    options = {"total_timesteps": 10**6, "chunk_size": 10, "num_chunks": 5}
    made = [generate_random_chunks(**options, seed=seed, epoch=epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert generate_random_chunks(**options) == made[0]
    assert len({tuple(chunks) for chunks in made}) == 3
    rng = random.Random(3)
    own = [generate_random_chunks(**options, rng=rng) for _ in range(2)]
    assert own[0] == generate_random_chunks(**options, rng=random.Random(3)) != own[1]


# -- staggered acquisition ---------------------------------------------------------------------------------------------


@given(
    units=st.integers(1, 6),
    steps=st.integers(0, 12),
    spare=st.integers(0, 30),
    mode=st.sampled_from(["time_aligned", "staggered_random"]),
)
def test_every_neuron_begins_at_its_own_phase_and_ends_within_the_chunk(
    units: int, steps: int, spare: int, mode: Any
) -> None:
    size, neurons = steps + units + spare, 7
    phases = compute_neuron_phases(neurons, units, mode, generator=generator(units))
    assert phases is not None
    assert ((phases >= 0) & (phases < units)).all()
    found = sample_batch_indices(size, steps, units, 40, neurons, phases, generator=generator(1))
    assert found.shape == (40, neurons)
    assert torch.equal(found % units, phases.expand(40, neurons))
    assert found.min() >= 0
    assert found.max() + steps <= size - 1


def test_a_unit_is_the_same_for_all_neurons_of_a_sample_and_all_units_occur() -> None:
    phases = torch.tensor([0, 3, 1])
    found = sample_batch_indices(24, 4, 4, 400, 3, phases, generator=generator())
    units = found // 4
    assert (units == units[:, :1]).all()
    assert set(units[:, 0].tolist()) == set(range(5))  # 4 × 4 + 3 + 4 = 23, the last frame


def test_without_phases_neurons_begin_together_anywhere() -> None:
    assert compute_neuron_phases(5, 4, "all_time_points") is None
    found = sample_batch_indices(10, 3, 4, 300, 5, None, generator=generator())
    assert (found == found[:, :1]).all()
    assert set(found[:, 0].tolist()) == set(range(7))


def test_phases_and_frames_are_those_of_the_generator_alone() -> None:
    made = [compute_neuron_phases(50, 9, "staggered_random", generator=generator(3)) for _ in range(2)]
    assert made[0] is not None
    assert torch.equal(made[0], made[1])
    frames = [sample_batch_indices(99, 9, 9, 20, 50, made[0], generator=generator(3)) for _ in range(2)]
    assert torch.equal(*frames)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(OptionError, match=r"mode must be one of .*'staggered_random', got 'never'"):
        compute_neuron_phases(5, 4, "never")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"neuron_phases must have shape \(5,\), got \(3,\)"):
        sample_batch_indices(10, 3, 2, 4, 5, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="chunk_size must hold 3 steps in units of 4 frames, got 6"):
        sample_batch_indices(6, 3, 4, 4, 5, torch.zeros(5, dtype=torch.int64))


# -- latency -----------------------------------------------------------------------------------------------------------

KEYS = {
    "chunk_get_mean_ms",
    "chunk_get_max_ms",
    "chunk_get_min_ms",
    "batch_forward_mean_ms",
    "batch_backward_mean_ms",
    "batch_step_mean_ms",
    "num_chunks",
    "num_batches_sampled",
}


def test_without_records_everything_is_zero() -> None:
    summary = ChunkLatencyStats().get_summary()
    assert summary == dict.fromkeys(KEYS, 0.0)
    assert all(isinstance(value, float) for value in summary.values())


def test_means_and_extremes_are_in_milliseconds() -> None:
    stats = ChunkLatencyStats()
    for seconds in (0.004, 0.001, 0.007):
        stats.record_chunk_get(seconds)
    stats.record_batch_times(0.002, 0.004, 0.006)
    stats.record_batch_times(0.004, 0.008, 0.012)
    assert stats.get_summary() == pytest.approx(
        {
            "chunk_get_mean_ms": 4,
            "chunk_get_max_ms": 7,
            "chunk_get_min_ms": 1,
            "batch_forward_mean_ms": 3,
            "batch_backward_mean_ms": 6,
            "batch_step_mean_ms": 9,
            "num_chunks": 3,
            "num_batches_sampled": 2,
        }
    )
    printed = io.StringIO()
    stats.print_summary(printed)
    assert printed.getvalue() == (
        "Chunks: 3, wait mean 4.00 ms, min 1.00 ms, max 7.00 ms\n"
        "Batches timed: 2, forward 3.00 ms, backward 6.00 ms, step 9.00 ms\n"
    )


def test_statistics_take_no_more_memory_the_longer_they_run() -> None:
    stats = ChunkLatencyStats()
    for _ in range(1000):
        stats.record_chunk_get(0.5)
        stats.record_batch_times(0.5, 0.5, 0.5)
    assert not [name for name, value in vars(stats).items() if hasattr(value, "__len__")]
    assert stats.get_summary()["num_chunks"] == 1000
