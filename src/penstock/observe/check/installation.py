"""The installation: versions, what is missing and which extra brings it, and the part that is written in C."""

import platform
import shlex
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from penstock.core.errors import PenstockError
from penstock.core.version import __version__
from penstock.files.regular import read_regular
from penstock.observe.finding import Finding

__all__ = ["OPTIONAL", "REQUIRED", "examine_installation", "import_name"]

# As in pyproject.toml; a test compares them.
REQUIRED = {"numpy": "1.26", "rich": "13.8", "torch": "2.4", "typer": "0.12", "xxhash": "3.4"}
"""Packages that must be there, with their lowest versions."""

OPTIONAL = {
    "zarr": ("3.1.3", "zarr"),
    "numcodecs": ("0.15", "zarr"),
    "pynwb": ("2.8", "nwb"),
    "h5py": ("3.10", "nwb"),
    "scipy": ("1.11", "audio"),
    "soundfile": ("0.12", "audio"),
    "pillow": ("10", "image"),
    "pyarrow": ("15", "table"),
    "matplotlib": ("3.8", "report"),
    "lightning": ("2.4", "lightning"),
    "accelerate": ("1.0", "accelerate"),
    "omegaconf": ("2.3", "yaml"),
    "distributed": ("2024.8", "dask"),
    "obstore": ("0.4", "remote"),
}
"""Packages that some functions need, with their lowest versions and an extra of Penstock that brings them."""

_OTHERS = {"hdmf-zarr": "0.9"}  # excludes zarr 3, so that it is never named as missing
_IMPORT_NAMES = {"pillow": "PIL"}


def import_name(package: str) -> str:
    """Return the module that a package is imported as."""
    return _IMPORT_NAMES.get(package, package.replace("-", "_"))


def examine_installation(probed: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings on versions, imports and the C part; `probed` is the answer of `run_probe`."""
    yield _examine_python()
    yield from _examine_required(probed)
    yield _examine_optional()
    yield _examine_native()


def _examine_python() -> Finding:
    package = Path(__file__).parents[2]
    found = f"Penstock {__version__} in {package}, {platform.python_implementation()} {platform.python_version()}"
    facts = {
        "penstock": __version__,
        "package": str(package),
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "platform": platform.platform(),
    }
    return Finding("installation.versions", "ok", f"{found} on {platform.platform()}.", facts=facts)


def _examine_required(probed: Mapping[str, Any]) -> Iterator[Finding]:
    versions = {name: _version(name) for name in REQUIRED}
    broken = {name: text for name, text in probed["imports"].items() if text and versions.get(name)}
    wrong = [name for name, lowest in REQUIRED.items() if not _is_at_least(versions[name], lowest)]
    shown = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    if wrong:
        needed = " ".join(f"'{name}>={REQUIRED[name]}'" for name in wrong)
        yield Finding(
            "installation.required",
            "problem",
            f"Required packages are missing or too old: {shown}.",
            "Install them into the environment of this Python.",
            f"{sys.executable} -m pip install {needed}",
            facts={"versions": versions, "wrong": wrong},
        )
    else:
        yield Finding("installation.required", "ok", f"Required packages: {shown}.", facts={"versions": versions})
    for name, reason in broken.items():
        yield Finding(
            "installation.import",
            "problem",
            f"{name} {versions[name]} is installed, but cannot be imported: {reason[:300]}.",
            "Install it again.",
            f"{sys.executable} -m pip install --force-reinstall --no-deps '{name}=={versions[name]}'",
            facts={"package": name, "error": reason[:2000]},
        )
    if probed["ended"]:
        tried = ", ".join(probed["imports"]) or "none"
        yield Finding(
            "installation.probe",
            "warning",
            f"A process that tries workers and imports ended early ({probed['ended']}); imported by then: {tried}.",
            "Import the packages one by one to see which it is.",
            f"{sys.executable} -c 'import numpy, xxhash, torch'",
            facts={"ended": probed["ended"]},
        )


def _examine_optional() -> Finding:
    lowest = {**{name: low for name, (low, _) in OPTIONAL.items()}, **_OTHERS}
    versions = {name: version for name in lowest if (version := _version(name))}
    missing = [name for name in OPTIONAL if name not in versions]
    old = [name for name, version in versions.items() if not _is_at_least(version, lowest[name])]
    facts = {"versions": versions, "missing": {name: OPTIONAL[name][1] for name in missing}, "too_old": old}
    shown = ", ".join(f"{name} {version}" for name, version in versions.items()) or "none"
    found = f"Optional packages: {shown}."
    if missing:
        found += f" Not installed: {', '.join(f'{name} ({OPTIONAL[name][1]})' for name in missing)}."
    if old:
        found += f" Too old: {', '.join(f'{name} (needs {lowest[name]})' for name in old)}."
    extras = ",".join(dict.fromkeys(OPTIONAL[name][1] for name in (*old, *missing) if name in OPTIONAL))
    if not extras:
        return Finding("installation.optional", "ok", found, facts=facts)
    return Finding(
        "installation.optional",
        "warning" if old else "note",
        found,
        "Install the extras that you need; each error that misses a package names its extra.",
        f"{sys.executable} -m pip install 'penstock[{extras}]'",
        facts=facts,
    )


def _examine_native() -> Finding:
    clone = Path(__file__).parents[4]
    what = f"-e {shlex.quote(str(clone))}" if (clone / "hatch_build.py").exists() else "penstock"
    command = f"{sys.executable} -m pip install --force-reinstall --no-deps {what}"
    try:
        from penstock.source.native import checksum_version, find_obstacle  # noqa: PLC0415  # imports numpy: may be missing

        version, obstacle = checksum_version(), find_obstacle()
    except (PenstockError, ImportError) as error:
        return Finding(
            "installation.native", "problem", f"{error}", "Install Penstock again, which compiles it.", command
        )
    features = _cpu_features()
    facts = {"checksum_version": version, "machine": platform.machine(), "features": features}
    if obstacle is not None:
        found = f"The part in C is not used: items are read with NumPy and xxhash, which is slower. {obstacle}"
        if "PENSTOCK_NATIVE" in obstacle:
            return Finding("installation.native", "note", found, "Unset it to use the part in C.", facts=facts)
        advice = "Install a wheel for this machine, or a C compiler, then Penstock again."
        return Finding("installation.native", "note", found, advice, command, facts=facts)
    widths = ", ".join(features) or "no SIMD extensions that are known here"
    runs = "AVX2, 32 bytes at once" if version == "avx2" else "portable C, 8 bytes at once"
    built = "was built with its wheel"
    if (Path(__file__).parents[2] / "source" / "native.c").exists():
        built = "matches its source"
    found = f"The part in C is there and {built}. CPU: {platform.machine()} with {widths}."
    return Finding("installation.native", "ok", f"{found} Checksums run as {runs}.", facts=facts)


def _cpu_features() -> list[str]:
    """Return the extensions of this CPU that matter to copies and checksums."""
    known = ("sse4_2", "avx", "avx2", "avx512f", "asimd", "sve")
    try:
        lines = read_regular("/proc/cpuinfo").decode(errors="replace").splitlines()
    except OSError:
        return []
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "").split()
    return [name for name in known if name in flags]


def _version(package: str) -> str:
    """Return the installed version of a package; empty if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _is_at_least(version: str, lowest: str) -> bool:
    return bool(version) and _numbers(version) >= _numbers(lowest)


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.partition("+")[0].split(".")
    digits = ["".join(letter for letter in part if letter.isdigit()) for part in parts]
    return tuple(int(part) for part in digits[:3] if part)
