"""Runs the tests of the C part with AddressSanitizer and UndefinedBehaviorSanitizer: `python tools/sanitize.py`.

The package is copied into a temporary folder and compiled there with the sanitizers, so that nothing of them is in the
package itself. A read or write outside of an array, an overflow or a misaligned access ends the tests with its place.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "hatch_build.py", "pyproject.toml")
TESTS = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests" / "source").glob("test_native*.py"))]
FLAGS = "-g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
OPTIONS = {
    # SIGBUS is ours: a file that shrinks under its map. Python frees nothing at its exit, which is no leak.
    "ASAN_OPTIONS": "detect_leaks=0:handle_sigbus=0:allocator_may_return_null=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # Every object has an allocation of its own, with guarded bytes around it.
    "PYTHONMALLOC": "malloc",
}


def main() -> int:
    """Return the exit code of pytest."""
    compiler = os.environ.get("CC", "gcc")
    library = _find_library(compiler)
    with tempfile.TemporaryDirectory(prefix="penstock-sanitize-") as folder:
        for name in COPIED:
            _copy(ROOT / name, Path(folder) / name)
        environment = {**os.environ, "CC": f"{compiler} {FLAGS}", "PYTHONPATH": f"{folder}/src"}
        subprocess.run([sys.executable, "hatch_build.py"], cwd=folder, env=environment, check=True)
        # The sanitizers write to the standard error, and report a segmentation fault themselves.
        options = ("-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--capture=sys")
        command = [sys.executable, "-m", "pytest", *options, *(sys.argv[1:] or TESTS)]
        environment |= {**OPTIONS, "LD_PRELOAD": library}
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def _find_library(compiler: str) -> str:
    """Return the path of libasan, which Python itself has to load first; end with what to do if there is none."""
    if shutil.which(compiler.split(maxsplit=1)[0]) is None:
        sys.exit(f"This needs gcc, and there is no {compiler}. Install it (Debian: apt-get install gcc).")
    asked = [*compiler.split(), "-print-file-name=libasan.so"]
    found = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    if not found.is_absolute():
        sys.exit(
            f"{compiler} has no libasan, so the C part cannot be tested with AddressSanitizer. Install it (Debian: "
            "apt-get install gcc libc6-dev, Fedora: dnf install libasan libubsan), or use CC=gcc if this is clang."
        )
    return str(found.resolve())


def _copy(path: Path, target: Path) -> None:
    if path.is_dir():
        shutil.copytree(path, target, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    else:
        shutil.copy2(path, target)


if __name__ == "__main__":
    sys.exit(main())
