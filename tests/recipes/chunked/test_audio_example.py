"""The example of chunked audio trains, is interrupted, and ends with the same losses, bit for bit."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[3] / "examples" / "chunked_audio.py"
    spec = importlib.util.spec_from_file_location("chunked_audio", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_learns_and_resumes_bit_for_bit(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    whole, resumed = example.main(["--quick"])
    assert len(whole) == 15
    assert resumed == whole
    assert whole[-1] < whole[0] - 0.2
    printed = capsys.readouterr().out
    assert "interrupted after 6 steps, at pass 1, chunk 2/" in printed
    assert "are equal" in printed


def test_it_explains_itself(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        example.main(["--help"])
    assert ended.value.code == 0
    assert "KEY=VALUE" in capsys.readouterr().out
