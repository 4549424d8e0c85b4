"""Set-up where pip finds only CUDA builds of torch: a CPU build is installed first."""

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "cpu_torch.py"
CPU, CUDA = ["torch", "numpy", "sympy"], ["torch", "nvidia-cublas-cu12", "triton", "numpy"]


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cpu_torch", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("index", "names", "calls"),
    [("", CUDA, (0, 0)), ("URL", CPU, (1, 0)), ("URL", CUDA, (1, 1)), ("URL", None, (1, 0))],
)
def test_torch_comes_from_the_index_only_if_pip_would_bring_cuda(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, index: str, names: list[str] | None, calls: tuple[int, int]
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        report = {"install": [{"metadata": {"name": name}} for name in names or []]}
        return subprocess.CompletedProcess(command, names is None, json.dumps(report), "")

    monkeypatch.setattr(script.subprocess, "run", run)
    script.main(index)
    dry = ["--dry-run" in command for command in commands]
    assert (dry.count(True), dry.count(False)) == calls
    if calls[1]:
        assert commands[-1][-3:] == ["--index-url", "URL", "torch"]
