"""TarSource in Concat, Take and Zip: every item keeps its content."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from penstock_source_suite import Case, ShortSuite, same
from penstock_test_shards import Kind, Sample, TarSuite, Truth, cases_of, uniform, write

from penstock import ArraySource, Concat, Source, SourceError, TarSource, Zip
from penstock.source import Take


def _concat(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    folder.mkdir()
    first = write(folder / "first", uniform(offset, 9))
    second = write(folder / "second", uniform(offset + 9, 14), [{"note": "n" * (i * 97)} for i in range(14)])
    return lambda i: first(i) if i < 9 else second(i - 9), 23, {}


def _combined(kind: str) -> Kind:
    def make(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
        if kind == "concat":
            return _concat(folder, offset)
        truth = write(folder, uniform(offset), [{"note": "n" * (i * 97)} for i in range(23)])
        if kind == "take":
            return lambda i: truth((i * 5 + 2) % 23), 23, {}
        return lambda i: {**truth(i), "z": np.int64(i + offset)}, 23, {}

    return make


def _opened(name: str, folder: Path, options: Sample, offset: int) -> Source:
    if name == "concat":
        return Concat([TarSource(folder / "first"), TarSource(folder / "second", chunk_items=3)])
    if name == "take":
        return Take(TarSource(folder), (np.arange(23) * 5 + 2) % 23)
    parts = [TarSource(folder, fields=["metadata", "x"]), ArraySource({"z": np.arange(23) + offset})]
    return Zip([*parts, TarSource(folder, fields=["y"])])


KINDS: dict[str, Kind] = {
    "concat": _combined("concat"),
    "take": _combined("take"),
    "zip": _combined("zip"),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return cases_of(KINDS, tmp_path_factory, _opened)


class TestTarSource(ShortSuite):
    suite = TarSuite

    @pytest.fixture(params=KINDS)
    def case(self, request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
        return cases(request.param)


def test_a_concat_of_fixed_and_varying_fields_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "fixed", uniform(0, 4))
    write(tmp_path / "ragged", [{"x": np.int64(i), "y": np.zeros((i, 3), np.float32)} for i in range(4)])
    with pytest.raises(SourceError, match="must have the same fields"):
        Concat([TarSource(tmp_path / "fixed"), TarSource(tmp_path / "ragged")])


def test_a_concat_fills_out_across_its_sources(tmp_path: Path) -> None:
    truths = [
        write(tmp_path / str(k), uniform(100 * k, 6), [{"note": "n" * 300 * i} for i in range(6)]) for k in range(3)
    ]
    both = Concat([TarSource(tmp_path / str(k)) for k in range(3)])
    items = np.array([17, 0, 6, 6, 11, 5])
    out = {"x": np.zeros(6, np.int64), "y": np.zeros((6, 2, 3), np.float32)}
    block = both.take(items, out)
    assert block["x"] is out["x"]
    assert block["y"] is out["y"]
    for row, item in enumerate(items.tolist()):
        wanted = truths[item // 6](item % 6)
        assert all(same(block[name][row], wanted[name]) for name in ("x", "y", "metadata"))
