"""What `pip install penstock` without extras can do, and what it says where an extra is missing."""

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from penstock import MissingDependency

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
FOR_USERS = set(EXTRAS) - {"all", "dev", "docs", "s3"}


def needed(requirements: list[str]) -> set[str]:
    """Return the distributions that pip would bring for some requirements: these, what they need, and so on."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        try:
            waiting += [Requirement(text) for text in importlib.metadata.requires(name) or ()]
        except importlib.metadata.PackageNotFoundError:  # needed on another machine: CUDA, for one
            continue
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What happened in a process that can import nothing but the core's own dependencies."""
    owners = {
        top: {canonicalize_name(name) for name in names}
        for top, names in importlib.metadata.packages_distributions().items()
    }
    core, with_zarr = needed(PROJECT["dependencies"]) | {"penstock"}, needed(EXTRAS["zarr"])
    given = {
        "hidden": [top for top, names in owners.items() if not names & core],
        "zarr": [top for top, names in owners.items() if names & with_zarr],
    }
    assert {"scipy", "zarr", "matplotlib", "h5py", "pandas", "yaml", "PIL", "requests"} <= set(given["hidden"])
    assert not {"numpy", "torch", "typer", "rich", "xxhash"} & set(given["hidden"])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("bare.py"))],
        input=json.dumps(given) + "\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=tmp_path_factory.mktemp("bare"),
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_shards_are_written_and_loaded(bare: dict[str, Any]) -> None:
    whole = {"x": [[2.0 * item, 2.0 * item + 1] for item in range(20)], "label": list(range(20))}
    assert bare["loaded"] == {"0": whole, "1": whole}


def test_commands_run_or_say_what_to_install(bare: dict[str, Any]) -> None:
    found = bare["commands"]
    assert {line: code for line, (code, *_) in found.items()} == {
        "--help": 0,
        "check shards --all": 0,
        "inspect shards --png a.png": 1,
        "convert shards -o again": 0,
        "convert session.nwb -o out": 1,
    }
    assert "20 items in 4 shards" in found["check shards --all"][1]
    assert "pip install 'penstock[report]'" in found["inspect shards --png a.png"][2]
    assert "pip install 'penstock[nwb]'" in found["convert session.nwb -o out"][2]


@pytest.mark.parametrize("extra", sorted(FOR_USERS - {"volume", "yaml", "dask"}))
def test_what_an_extra_is_for_says_to_install_it(bare: dict[str, Any], extra: str) -> None:
    kind, message = bare["refusals"][extra]
    assert kind == "MissingDependency"
    assert message.endswith(f"; install it with: pip install 'penstock[{extra}]'")


def test_a_configuration_says_to_install_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.recipes.trainers import build_from_config  # with Lightning, which it needs first

    monkeypatch.setitem(sys.modules, "omegaconf", None)
    with pytest.raises(MissingDependency, match=r"pip install 'penstock\[yaml\]'$"):
        build_from_config({})


def test_volumes_need_what_zarr_stores_need() -> None:
    """So that what they say, `penstock[zarr]`, is right, and `penstock[volume]` is as well."""
    assert EXTRAS["volume"] == EXTRAS["zarr"]


def test_s3_is_another_name_of_the_extra_for_urls() -> None:
    assert EXTRAS["s3"] == ["penstock[remote]"]


def test_all_means_every_extra_that_can_be_installed_together() -> None:
    (everything,) = EXTRAS["all"]
    assert Requirement(everything).extras == FOR_USERS - {"nwb-zarr"}
