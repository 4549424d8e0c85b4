"""Installs a CPU build of torch first, if pip would bring gigabytes of CUDA: `python tools/cpu_torch.py URL`.

Run by the set-up of `make`, with the index of CPU builds: the variable TORCH_INDEX, which may be empty. If pip finds a
build without CUDA by itself, nothing is done; if the index cannot be reached, pip decides as well.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).parents[1] / "constraints" / "dev.txt"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "-c", str(CONSTRAINTS)]


def brings_cuda(report: dict[str, Any]) -> bool:
    """Return whether pip would install packages of CUDA, given what `pip install --dry-run --report` writes."""
    names = [each["metadata"]["name"].lower() for each in report["install"]]
    return any(name.startswith(("nvidia-", "nvidia_", "cuda-")) or name == "triton" for name in names)


def main(index: str) -> None:
    """Ask pip, and install torch from the index if need be."""
    if not index:
        return
    asked = subprocess.run([*PIP, "--dry-run", "--report", "-", "torch"], capture_output=True, text=True, check=False)
    if asked.returncode or not brings_cuda(json.loads(asked.stdout)):
        return  # the installation itself says what is wrong
    print(f"pip would install CUDA, so torch comes from {index} (TORCH_INDEX= leaves that to pip) ...")
    if subprocess.run([*PIP, "--no-compile", "--no-deps", "--index-url", index, "torch"], check=False).returncode:
        print("That failed: torch is installed as pip finds it, with CUDA.")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
