"""Compiles the one file of C, for wheels and editable installs; `python hatch_build.py` does it in a clone.

Without a C compiler, or if it fails, the package is installed without the C part, and reads with NumPy instead. The
environment variable PENSTOCK_NATIVE says otherwise: with 1, that is an error, as for wheels that are published; with 0,
nothing is compiled.
"""

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


def build() -> str | None:
    """Compile; return None, or why there is no library then: an old one is removed."""
    wanted = os.environ.get("PENSTOCK_NATIVE", "")
    reason = "PENSTOCK_NATIVE is 0" if wanted == "0" else _compile()
    if reason is not None:
        if wanted == "1":
            sys.exit(f"PENSTOCK_NATIVE is 1, but the C part of Penstock was not compiled: {reason}.")
        LIBRARY.unlink(missing_ok=True)
    return reason


def _compile() -> str | None:
    """Write the library aside, then rename it: processes that use the old one keep it. Return None, or what failed."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "there is no C compiler (cc, gcc or clang; Debian: apt-get install gcc libc6-dev)"
    digest = f"-DSOURCE_DIGEST=0x{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"
    with tempfile.TemporaryDirectory(dir=LIBRARY.parent, prefix=".native-") as folder:
        aside = Path(folder) / LIBRARY.name
        command = [*compiler.split(), *FLAGS, digest, "-o", str(aside), str(SOURCE)]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")  # noqa: S603  # our own
        except OSError as error:
            return f"{compiler} cannot be run: {error}"
        if done.returncode:
            return f"{compiler} failed:\n{done.stderr.strip()}"
        sys.stderr.write(done.stderr)  # warnings
        aside.replace(LIBRARY)
    return None


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg,misc]
    """What hatchling calls before it builds a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say for which machines the wheel is: of this kind with C, any without; with any Python."""
        reason = build()
        if reason is not None:
            self.app.display_warning(f"Penstock is installed without its C part, and reads more slowly: {reason}.")
            build_data["tag"] = "py3-none-any"
            return
        machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{machine}"
        build_data["pure_python"] = False
        build_data["artifacts"].append(str(LIBRARY.relative_to(self.root)))


if __name__ == "__main__":
    missing = build()
    if missing is not None:
        sys.stderr.write(f"The C part is not compiled, and items are read more slowly: {missing}.\n")
