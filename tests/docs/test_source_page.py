"""The source that docs/how-to/your-own-data.md builds does what every source does."""

import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from penstock_source_suite import Case, SourceSuite

_PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "your-own-data.md"
_SIZES = (7, 12, 4)


def _values(offset: int) -> list[np.ndarray]:
    return [(100 * number + offset + np.arange(2 * size)).reshape(size, 2) for number, size in enumerate(_SIZES)]


def _written(folder: Path, offset: int) -> str:
    folder.mkdir()
    for number, values in enumerate(_values(offset)):
        np.save(folder / f"{number}.npy", values)
    return str(folder)


class TestTheSourceOfThePage(SourceSuite):
    @pytest.fixture
    def case(self, tmp_path, monkeypatch):
        (block,) = re.findall(r"^```python\n([^`]*^class Folder:.*?)^```$", _PAGE.read_text(), re.M | re.S)
        module = types.ModuleType("write_a_source_page")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(block, module.__dict__)
        here, there = _written(tmp_path / "here", 0), _written(tmp_path / "there", 5)
        whole = np.concatenate(_values(0))
        return Case(
            make=lambda: module.Folder(here),
            truth=lambda item: {"signal": whole[item]},
            n_items=sum(_SIZES),
            other=lambda: module.Folder(there),
        )
