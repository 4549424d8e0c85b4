"""Keys and generators derived from a seed and a path."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import PlanError
from penstock.core.seeds import check_seed, generator_for, key_for, mix64, subkeys

paths = st.lists(st.text(max_size=4) | st.integers(0, 2**40), max_size=4).map(tuple)
seeds = st.integers(0, 2**70)


@given(seeds, paths, seeds, paths)
def test_different_paths_have_different_keys(seed: int, path: tuple, other_seed: int, other_path: tuple) -> None:
    same = (seed, path) == (other_seed, other_path)
    assert (key_for(seed, *path) == key_for(other_seed, *other_path)) == same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, "1"), (0, 1)),
        ((0, "a", "b"), (0, "a b")),
        ((0, "a", "b"), (0, "ab")),
        ((0, "a", "b"), (0, "a', 'b")),
        ((0, "b", "a"), (0, "a", "b")),
        ((0, "order", 1), (1, "order", 0)),
        ((0, 1, 23), (0, 12, 3)),
        ((0, "a", ""), (0, "a")),
        ((0,), (1,)),
    ],
)
def test_paths_that_look_alike_are_kept_apart(one: tuple, other: tuple) -> None:
    assert key_for(*one) != key_for(*other)
    assert generator_for(*one).integers(2**62) != generator_for(*other).integers(2**62)


def test_numpy_integers_are_the_same_path_as_plain_ones() -> None:
    assert key_for(np.int64(7), "augment", np.int32(3), np.uint8(12)) == key_for(7, "augment", 3, 12)
    assert generator_for(np.int64(7), 3).random() == generator_for(7, np.int16(3)).random()


def test_numpy_strings_are_the_same_path_as_plain_ones() -> None:
    assert key_for(7, np.str_("augment"), 3) == key_for(7, "augment", 3)


@given(seeds, paths)
def test_a_key_has_64_bits_and_a_generator_is_the_same_every_time(seed: int, path: tuple) -> None:
    assert 0 <= key_for(seed, *path) < 2**64
    first, second = generator_for(seed, *path), generator_for(seed, *path)
    assert first.integers(2**62, size=3).tolist() == second.integers(2**62, size=3).tolist()


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**50), min_size=1, unique=True))
def test_subkeys_differ_and_do_not_depend_on_their_neighbours(key: int, numbers: list[int]) -> None:
    together = subkeys(key, np.array(numbers))
    assert together.dtype == np.uint64
    assert len(set(together.tolist())) == len(numbers)
    assert together.tolist() == [int(subkeys(key, np.array([number]))[0]) for number in numbers]


def test_neighbouring_keys_have_different_subkeys() -> None:
    made = np.concatenate([subkeys(key, np.arange(100)) for key in range(100)])
    assert len(np.unique(made)) == 10_000


def test_mixing_changes_about_half_of_all_bits_for_any_changed_bit() -> None:
    x = subkeys(1, np.arange(2000))
    for bit in range(64):
        changed = mix64(x) ^ mix64(x ^ np.uint64(1 << bit))
        assert 31 < np.unpackbits(changed.view(np.uint8)).sum() / len(x) < 33, bit


@pytest.mark.parametrize("seed", [0, 1, 2**70, np.int64(5), np.uint64(2**63)])
def test_an_integer_is_a_seed(seed: int) -> None:
    checked = check_seed(seed)
    assert checked == seed
    assert type(checked) is int


@pytest.mark.parametrize("seed", [1.5, 1.0, "1", None, True, np.float64(3)])
def test_a_seed_that_is_no_integer_is_refused(seed: object) -> None:
    with pytest.raises(PlanError, match=r"seed must be an integer >= 0, got .*"):
        check_seed(seed)


@pytest.mark.parametrize("seed", [-1, np.int64(-5)])
def test_a_negative_seed_is_refused(seed: int) -> None:
    with pytest.raises(PlanError, match=f"seed must be an integer >= 0, got {seed}"):
        check_seed(seed)


def test_a_key_of_more_than_64_bits_counts_by_its_last_64() -> None:
    assert subkeys(2**64 + 5, np.arange(3)).tolist() == subkeys(5, np.arange(3)).tolist()
    assert subkeys(2**65 - 1, np.arange(3)).tolist() == subkeys(2**64 - 1, np.arange(3)).tolist()
