"""Which tests are slow: found in what they call, and in how long they took; nobody keeps a list.

A test is slow if its code, or a fixture or function of the tests that it uses, starts programs, workers, notebooks or
servers. Of a test with many cases, or long ones, as many are quick as fit into 0.4 s, by the times in
`tests/seconds.json`; a test without a time is quick. `make test` leaves slow tests out, except those with the mark
`canary`, of which there is one of each kind. All of them run in `make test-all`, which CI runs, and if they are named.
"""

import dataclasses
import json
import os
import resource
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import pytest
from penstock_cases import spread_evenly

__all__ = ["KINDS", "SECONDS", "find_kinds", "mark_slow", "measure"]

_TESTS = Path(__file__).parents[1]
SECONDS = _TESTS / "seconds.json"
"""CPU seconds of a case of each test function that takes long, as `tools/run_tests.py measure` found them; a file
with null is slow, and was not measured yet."""

# What all cases of a test, and a single case of it, may take at most to be quick.
_TOGETHER_SECONDS, _ALONE_SECONDS = 0.4, 2.5

# Names in code, and what a test that uses them starts.
_NAMES = {
    "subprocess": "program",
    "LocalCluster": "cluster",
    "NotebookClient": "notebook",
    "cached_pages": "page cache",
    "serve_http": "server",
    "serve_s3": "server",
}
# Values: arguments, and parameters of cases.
_VALUES = {"spawn": "spawn", "forkserver": "spawn"}
KINDS = frozenset([*_NAMES.values(), *_VALUES.values()])
_MOST_VALUES, _DEPTH = 50, 3  # of a parameter or a global value that are looked at

_USED: dict[CodeType, tuple[frozenset[str], tuple[FunctionType, ...]]] = {}


def mark_slow(items: list[pytest.Item]) -> None:
    """Mark the slow tests with what makes them slow."""
    took = json.loads(SECONDS.read_text())
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("canary") is not None:
            continue
        name = _function(item)
        if kinds := find_kinds(item):
            item.add_marker(pytest.mark.slow(", ".join(sorted(kinds))))
        if took.get(name.split("::")[0], 0) is None:
            item.add_marker(pytest.mark.slow("not measured yet"))
        elif name in took:
            functions.setdefault(name, []).append(item)
    for name, cases in functions.items():
        count = 0 if took[name] > _ALONE_SECONDS else max(1, int(_TOGETHER_SECONDS / took[name]))
        for case in set(cases) - set(spread_evenly(cases, count)):
            case.add_marker(pytest.mark.slow(f"{took[name]} s"))


def find_kinds(item: pytest.Item) -> frozenset[str]:
    """Return what a test starts: some of `KINDS`."""
    if not isinstance(item, pytest.Function):
        return frozenset()
    found: set[str] = set()
    callspec = getattr(item, "callspec", None)
    waiting = [item.function, *_list_fixtures(item), *_look_into(callspec.params if callspec else {}, found)]
    seen: set[FunctionType] = set()
    while waiting:
        for function in _list_functions(waiting.pop()):
            if function not in seen:
                seen.add(function)
                kinds, used = _look_at(function)
                found |= kinds
                waiting += used
    return frozenset(found)


def _list_fixtures(item: pytest.Function) -> Iterator[Any]:
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        yield definitions[-1].func


def _list_functions(thing: Any) -> Iterator[FunctionType]:
    """Yield a function of the tests, or those of a class of the tests."""
    thing = getattr(thing, "__wrapped__", thing)
    if isinstance(thing, MethodType):
        thing = thing.__func__
    members = vars(thing).values() if isinstance(thing, type) else [thing]
    for member in members:
        function = getattr(member, "__wrapped__", member)
        file = function.__code__.co_filename if isinstance(function, FunctionType) else ""
        if file.startswith(str(_TESTS)) and file != __file__:
            yield function


def _look_at(function: FunctionType) -> tuple[frozenset[str], tuple[Any, ...]]:
    """Return what a function starts by itself, and the functions and classes that it uses."""
    known = _USED.get(function.__code__)
    if known is None:
        kinds: set[str] = set()
        used: list[Any] = []
        for code in _list_codes(function.__code__):
            used += _look_into([const for const in code.co_consts if isinstance(const, str)], kinds)
            kinds |= {_NAMES[name] for name in code.co_names if name in _NAMES}
            for name in code.co_names:
                used += _look_into(function.__globals__.get(name), kinds)
        known = _USED[function.__code__] = frozenset(kinds), tuple(used)
    return known


def _list_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _list_codes(const)


def _look_into(value: Any, kinds: set[str], depth: int = 0) -> list[Any]:
    """Add what the texts in a value say to `kinds`; return the functions and classes in it."""
    if isinstance(value, str):
        kinds |= {_VALUES[value]} if value in _VALUES else set()
        return []
    if isinstance(value, type) or callable(value):
        return [value]
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, tuple | list):
        inner = list(value)
    elif dataclasses.is_dataclass(value):
        inner = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        return []
    return [used for each in inner[:_MOST_VALUES] if depth < _DEPTH for used in _look_into(each, kinds, depth + 1)]


def _function(item: pytest.Item) -> str:
    return item.nodeid.split("[")[0]


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(item: pytest.Item, folder: str) -> Generator[None, Any, Any]:
    """Add a line to a file of `folder`: the name of a test, and the CPU seconds of it and of what it started."""
    begin = _cpu_seconds()
    try:
        return (yield)
    finally:
        with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps([_function(item), _cpu_seconds() - begin]) + "\n")


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
