"""The notebooks run from the first cell to the last, and are stored without output."""

import textwrap
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
    done = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = "".join(output.get("text", "") for cell in done.cells for output in cell.get("outputs", []))
    assert "0, 1 and 2 workers give the same bits" in said
    assert "The losses are equal, step by step" in said
    pictures = [
        output for cell in done.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 4


@pytest.mark.canary("notebook")
@pytest.mark.filterwarnings("ignore:Proactor event loop:RuntimeWarning")
def test_a_cell_loads_batches_with_worker_processes_of_its_own_classes() -> None:
    cell = """
        import penstock as ps

        class Squares:
            def __len__(self):
                return 12

            def __getitem__(self, item):
                return item * item

        source = ps.DatasetSource(Squares())
        plan = ps.Plan(source.index, ps.Sequential(), batch_size=4)
        options = ps.RunOptions(executor="processes", start_method="fork")
        with ps.Loader(source, plan, num_workers=2, options=options) as loader:
            print([batch.tolist() for batch in loader])
    """
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell))])
    (done,) = NotebookClient(notebook, timeout=300).execute().cells
    assert [output["text"] for output in done["outputs"]] == ["[[0, 1, 4, 9], [16, 25, 36, 49], [64, 81, 100, 121]]\n"]


def test_there_is_one() -> None:
    assert [path.name for path in NOTEBOOKS] == ["DataLoaderBenchmarking.ipynb"]
