"""The cache of all rooms: what it keeps, what it drops, and who loads."""

import os
import pickle
import threading
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.cache import SharedCache


def test_a_value_is_loaded_once_and_the_least_recently_used_one_is_dropped() -> None:
    cache: SharedCache[str] = SharedCache(max_bytes=10)
    loaded = []

    def get(key: str) -> str:
        return cache.get(key, lambda: loaded.append(key) or key.upper(), n_bytes=4)  # type: ignore[func-returns-value]

    assert [get(key) for key in "abacb"] == ["A", "B", "A", "C", "B"]
    assert loaded == ["a", "b", "c", "b"], "b was the least recently used one when c came"
    assert list(cache) == ["c", "b"]
    assert cache.n_bytes == 8


def test_asking_whether_a_value_is_cached_is_no_use_of_it() -> None:
    cache: SharedCache[str] = SharedCache(max_bytes=8)
    for key in "ab":
        cache.get(key, key.upper, n_bytes=4)
    assert "a" in cache
    assert "c" not in cache
    cache.get("c", lambda: "C", n_bytes=4)
    assert list(cache) == ["b", "c"]


@given(
    budget=st.integers(0, 60),
    requests=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["get", "find", "drop"])), max_size=60),
)
def test_the_most_recently_used_values_are_cached_within_the_budget(
    budget: int, requests: list[tuple[int, str]]
) -> None:
    cache: SharedCache[list[int]] = SharedCache(budget)
    model: OrderedDict[int, int] = OrderedDict()
    for key, request in requests:
        size, is_cached, loaded = 3 * key + 1, key in model, []
        if request == "drop":
            cache.drop(key)
            model.pop(key, None)
            continue
        if is_cached:
            model.move_to_end(key)
        if request == "find":
            assert cache.find(key) == ([key] if is_cached else None)
            continue
        found = cache.get(key, lambda key=key, loaded=loaded: loaded.append(1) or [key], size)  # type: ignore[misc,func-returns-value]
        assert (found, bool(loaded)) == ([key], not is_cached)
        if not is_cached and size <= budget:
            while sum(model.values()) + size > budget:
                model.popitem(last=False)
            model[key] = size
        assert cache.n_bytes == sum(model.values()) <= budget
        assert list(cache) == list(model)
    cache.clear()
    assert (len(cache), cache.n_bytes) == (0, 0)


def test_a_value_larger_than_the_budget_is_returned_and_drops_nothing() -> None:
    cache: SharedCache[str] = SharedCache(max_bytes=10)
    cache.get("small", lambda: "small", n_bytes=10)
    assert cache.get("large", lambda: "large", n_bytes=11) == "large"
    assert list(cache) == ["small"]


def test_the_number_of_values_is_bounded_while_one_is_loaded() -> None:
    cache: SharedCache[int] = SharedCache(max_bytes=100, max_entries=2)
    held: list[int] = []
    for number in range(5):
        cache.get(number, lambda number=number: held.append(len(cache)) or number, n_bytes=1)  # type: ignore[misc,func-returns-value]
    assert held == [0, 1, 1, 1, 1], "room is made before a value is loaded"
    assert list(cache) == [3, 4]


def test_threads_wait_for_the_one_that_loads() -> None:
    cache: SharedCache[object] = SharedCache(max_bytes=100)
    began, may_end = threading.Event(), threading.Event()
    loads: list[int] = []

    def load() -> object:
        loads.append(1)
        began.set()
        assert may_end.wait(30)
        return object()

    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(cache.get("x", load, 1))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert began.wait(30)
    may_end.set()
    for thread in threads:
        thread.join(30)
    assert len(found) == 4
    assert len(set(map(id, found))) == 1
    assert loads == [1]


def test_a_failed_load_is_raised_and_the_next_one_loads_again() -> None:
    cache: SharedCache[str] = SharedCache(max_bytes=100)

    def fail() -> str:
        raise OSError("no such chunk")

    with pytest.raises(OSError, match="no such chunk"):
        cache.get("x", fail, 1)
    assert cache.n_bytes == 0
    assert cache.get("x", lambda: "found", 1) == "found"


def test_a_thread_that_waited_for_a_failed_load_loads_by_itself() -> None:
    cache: SharedCache[str] = SharedCache(max_bytes=100)
    began, may_fail = threading.Event(), threading.Event()

    def fail() -> str:
        began.set()
        assert may_fail.wait(30)
        raise OSError("only for the first")

    errors: list[BaseException] = []

    def first() -> None:
        try:
            cache.get("x", fail, 1)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=first)]
    found: list[str] = []
    threads[0].start()
    assert began.wait(30)
    threads.append(threading.Thread(target=lambda: found.append(cache.get("x", lambda: "second", 1))))
    threads[1].start()
    may_fail.set()
    for thread in threads:
        thread.join(30)
    assert [str(error) for error in errors] == ["only for the first"]
    assert found == ["second"]


def test_what_was_dropped_while_it_was_loaded_is_not_kept() -> None:
    cache: SharedCache[str] = SharedCache(max_bytes=100)

    def load() -> str:
        cache.drop("x")  # another thread found that the file has changed
        return "old"

    assert cache.get("x", load, 1) == "old"
    assert cache.find("x") is None
    assert cache.n_bytes == 0


def test_a_forked_process_loads_what_a_thread_of_its_parent_was_loading() -> None:
    cache: SharedCache[str] = SharedCache(max_bytes=100)
    began, may_end = threading.Event(), threading.Event()
    cache.get("before", lambda: "kept", 1)

    def load() -> str:
        began.set()
        assert may_end.wait(30)
        return "parent"

    thread = threading.Thread(target=lambda: cache.get("x", load, 1))
    thread.start()
    assert began.wait(30)
    child = os.fork()
    if not child:  # pragma: no cover
        found = (cache.get("x", lambda: "child", 1), cache.find("before"))
        os._exit(0 if found == ("child", "kept") else 1)
    may_end.set()
    thread.join(30)
    assert os.waitpid(child, 0)[1] == 0


def test_a_pickled_cache_is_empty() -> None:
    cache: SharedCache[str] = SharedCache(max_bytes=7, max_entries=3)
    cache.get("x", lambda: "x", 1)
    copied = pickle.loads(pickle.dumps(cache))
    assert (len(copied), copied.max_bytes, copied.max_entries) == (0, 7, 3)
