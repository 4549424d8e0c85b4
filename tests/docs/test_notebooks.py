"""The notebooks run from the first cell to the last, and are stored without output."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:Proactor event loop:RuntimeWarning")
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    done = NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = "".join(output.get("text", "") for cell in done.cells for output in cell.get("outputs", []))
    assert "0, 1 and 2 workers give the same bits" in said
    assert "The losses are equal, step by step" in said
    pictures = [
        output for cell in done.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 4


def test_there_is_one() -> None:
    assert [path.name for path in NOTEBOOKS] == ["DataLoaderBenchmarking.ipynb"]
