"""Compiles native.c for aarch64 and runs its self-test under qemu: `python tools/aarch64.py`.

Checksums, copies, gathers, and a file that shrinks under its map (SIGBUS). Not in CI: it needs two packages of the
system. Debian: apt-get install gcc-aarch64-linux-gnu qemu-user libc6-dev-arm64-cross.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import xxhash

ROOT = Path(__file__).parents[1]
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
FLAGS = ["-O3", "-std=c11", "-Wall", "-Wextra", "-Werror"]
LENGTHS = [*range(300), 511, 512, 513, 1023, 1024, 1025, 4096, 4608, 8191, 65536]


def _make_bytes(count: int) -> bytes:
    """Return the bytes that the self-test makes as well."""
    state, found = 1, bytearray()
    for _ in range(count):
        state = (state * 1664525 + 1013904223) % (1 << 32)
        found.append(state >> 24)
    return bytes(found)


def main() -> int:
    """Return the exit code of the self-test."""
    for program in (COMPILER, EMULATOR):
        if shutil.which(program) is None:
            sys.exit(
                f"This needs {program}, which is not here. Install it (Debian: apt-get install "
                "gcc-aarch64-linux-gnu qemu-user libc6-dev-arm64-cross)."
            )
    content = _make_bytes(max(LENGTHS))
    sums = [f"{{{length}, 0x{xxhash.xxh3_64_intdigest(content[:length]):x}}},\n" for length in LENGTHS]
    with tempfile.TemporaryDirectory(prefix="penstock-aarch64-") as folder:
        (Path(folder) / "checksums.h").write_text("".join(sums))
        program = f"{folder}/selftest"
        source = str(ROOT / "tests" / "packaging" / "aarch64.c")
        subprocess.run([COMPILER, *FLAGS, "-static", "-I", folder, "-o", program, source], check=True)
        library = [COMPILER, *FLAGS, "-shared", "-fPIC", "-o", f"{folder}/libnative.so"]
        subprocess.run([*library, str(ROOT / "src" / "penstock" / "source" / "native.c")], check=True)
        return subprocess.run([EMULATOR, program], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
