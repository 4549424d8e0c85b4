"""Compiles the one file of C, for wheels and editable installs; `python hatch_build.py` does it in a clone."""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path(__file__).parent / "src" / "penstock" / "source" / "native.c"
LIBRARY = SOURCE.with_name("libnative.so")
FLAGS = ["-O3", "-std=c11", "-shared", "-fPIC", "-Wall", "-Wextra"]


def compiled() -> None:
    """Write the library aside, then rename it: processes that use the old one keep it."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        sys.exit(
            "Penstock has one file of C, and there is no C compiler (cc, gcc or clang) to compile it. "
            "Install one (Debian: apt-get install gcc), or install a wheel of Penstock."
        )
    digest = f"-DSOURCE_DIGEST=0x{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"
    with tempfile.TemporaryDirectory(dir=LIBRARY.parent, prefix=".native-") as folder:
        aside = Path(folder) / LIBRARY.name
        subprocess.run([*compiler.split(), *FLAGS, digest, "-o", str(aside), str(SOURCE)], check=True)  # noqa: S603  # our own
        aside.replace(LIBRARY)


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg,misc]
    """What hatchling calls before it builds a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say that the wheel is for this kind of machine, with any Python."""
        compiled()
        machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{machine}"
        build_data["pure_python"] = False
        build_data["artifacts"].append(str(LIBRARY.relative_to(self.root)))


if __name__ == "__main__":
    compiled()
