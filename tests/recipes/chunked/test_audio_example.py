"""The example of chunked audio trains, is interrupted, and ends with the same losses, bit for bit."""

from types import ModuleType

import pytest
from penstock_scripts import load_script

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_script("examples/chunked_audio.py")


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
