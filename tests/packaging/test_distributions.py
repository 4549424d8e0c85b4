"""What is published: a wheel with the package and nothing else, and an sdist that the tests can be run from."""

import ctypes
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from penstock import __version__

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "penstock"
OF_WHEELS = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist, and the wheel that is made from it; without the network."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def test_both_are_named_by_the_version(built: Path) -> None:
    assert sorted(path.name for path in built.iterdir()) == [
        f"penstock-{__version__}-py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}.whl",
        f"penstock-{__version__}.tar.gz",
    ]


def test_the_wheel_has_the_files_of_the_package_byte_by_byte_and_nothing_else(wheel: Path) -> None:
    about = f"penstock-{__version__}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    assert {name.removeprefix(about) for name in found if name.startswith(about)} == OF_WHEELS
    package = {
        str(path.relative_to(PACKAGE.parent)): path.read_bytes()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".c", ".so", ".md")
    }
    compiled = {"penstock/source/libnative.so"}
    assert {name: found[name] for name in found.keys() - compiled if not name.startswith(about)} == package
    assert compiled < found.keys()
    assert found[f"{about}licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert "penstock/py.typed" in found


@pytest.fixture(scope="module")
def unpacked(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source, to be built without a compiler."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder := tmp_path_factory.mktemp("unpacked"), filter="data")
    return folder / f"penstock-{__version__}"


def build_with(source: Path, **environment: str) -> tuple[list[str], str]:
    """Build a wheel; return its name and the names in it, and what was said."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(source / "out"), str(source)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=100, env={**os.environ, **environment}
    )
    found = []
    for wheel in (source / "out").glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            found = [wheel.name, *archive.namelist()]
        wheel.unlink()
    assert (done.returncode == 0) == bool(found)
    return found, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"CC": "/nowhere/cc"}, "/nowhere/cc cannot be run"),
        ({"CC": f"{sys.executable} -c exit('no\\x20such\\x20header')"}, "no such header"),
        ({"CC": "", "PATH": "/nowhere"}, "there is no C compiler"),
        ({"PENSTOCK_NATIVE": "0"}, "PENSTOCK_NATIVE is 0"),
    ],
)
def test_without_a_compiler_the_wheel_is_for_any_machine_and_says_why(
    unpacked: Path, environment: dict[str, str], why: str
) -> None:
    (name, *found), said = build_with(unpacked, **environment)
    assert name == f"penstock-{__version__}-py3-none-any.whl"
    assert "penstock/source/native/portable.py" in found
    assert not [each for each in found if each.endswith(".so")]
    assert "without its C part" in said
    assert why in said


def test_a_wheel_that_must_have_the_c_part_is_not_built_without_it(unpacked: Path) -> None:
    found, said = build_with(unpacked, CC="/nowhere/cc", PENSTOCK_NATIVE="1")
    assert found == []
    assert "PENSTOCK_NATIVE is 1, but the C part of Penstock was not compiled: /nowhere/cc cannot be run" in said


def test_the_metadata_says_what_a_person_looks_for(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        about = Parser().parsestr(archive.read(f"penstock-{__version__}.dist-info/METADATA").decode())
    assert about["Version"] == __version__
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == ">=3.11"
    core = [line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [re.split(r"[<>=]", line)[0] for line in core] == ["numpy", "rich", "torch", "typer", "xxhash"]
    assert about.get_payload() == (ROOT / "README.md").read_text()


def test_twine_finds_nothing_to_say(built: Path) -> None:
    said = run(sys.executable, "-m", "twine", "check", "--strict", *map(str, built.iterdir()), NO_COLOR="1")
    assert len(re.findall(r": PASSED$", re.sub(r"\x1b\[[0-9;]*m", "", said), re.M)) == 2


def test_the_command_of_the_wheel_runs_the_wheel(wheel: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    run(*pip, "--target", str(tmp_path), str(wheel))
    assert run(str(tmp_path / "bin" / "penstock"), "--version", PYTHONPATH=str(tmp_path)) == f"penstock {__version__}\n"
    where = run(sys.executable, "-c", "import penstock; print(penstock.__file__)", PYTHONPATH=str(tmp_path))
    assert Path(where.strip()) == tmp_path / "penstock" / "__init__.py"
    assert ctypes.CDLL(str(tmp_path / "penstock" / "source" / "libnative.so")).penstock_copy


def test_the_sdist_has_every_file_that_git_has(built: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone: nothing says which files belong to it")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    tracked = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    assert found == tracked | {"PKG-INFO"}
    assert {"Makefile", "constraints/dev.txt", "tests/conftest.py", "docs/index.md", "LICENSE"} <= found
