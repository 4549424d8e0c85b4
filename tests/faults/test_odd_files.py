"""Files that Penstock reads with one thing wrong in them, or in their place: its own errors, and no others."""

import json
import logging
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import yaml
from penstock_odd_json import damage, dump
from penstock_test_parts import run_isolated

import penstock as ps
from penstock.core.errors import DamageError, OptionError, PenstockError, WriteError
from penstock.files.machine import this_machine
from penstock.observe.run_file import read_run
from penstock.observe.tuning import Setting, Trial, Tuning
from penstock.recipes.trainers import build_from_config
from penstock.shard.manifest import MANIFEST
from penstock.source.tar.quarantine import Quarantine

NOBODY = 65534


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def check_all(
    path: Path, document: Any, use: Callable[[], None], seal: Callable[[Any], str] | None = None, step: int = 1
) -> int:
    """Write every `step`-th damaged form of a document to `path`, and use it; return how many were refused."""
    refused, others = 0, []
    for what, changed in islice(damage(document), 0, None, step):
        if seal is not None and isinstance(changed, dict):
            changed["checksum"] = seal(changed)
        path.write_bytes(dump(changed))
        try:
            use()
        except PenstockError:
            refused += 1
        except Exception as error:
            others.append(f"{what}: {error!r}")
    assert others == []
    return refused


# -- manifests ---------------------------------------------------------------------------------------------------------


def seal_manifest(document: dict[str, Any]) -> str:
    content = json.dumps(document, sort_keys=True, ensure_ascii=False)
    return xxhash.xxh3_64_hexdigest(content.encode(errors="surrogatepass"))


def make_dataset(folder: Path) -> dict[str, Any]:
    """Write 6 items into 2 shards; return the manifest without its checksum."""
    arrays = {"x": np.arange(6), "y": np.ones((6, 2))}
    ps.create_shards_from_arrays(folder, arrays, shard_size=3, metadata={"a": 1}, show_progress=False)
    stored: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    del stored["checksum"]
    return stored


def read_dataset(folder: Path) -> None:
    with closing(ps.TarSource(folder)) as source:
        ps.Plan(source.index, ps.Shuffle(), batch_size=2).epoch(0).draw(0)
        source.take(np.array([0, 5]))


def check_manifests(folder: Path) -> int:
    stored = make_dataset(folder)
    # A manifest of 2^40 items must not make room for them.
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, resource.RLIM_INFINITY))
    return check_all(folder / MANIFEST, stored, lambda: read_dataset(folder), seal_manifest, step=3)


def test_a_manifest_with_one_thing_wrong_is_refused_or_does_not_matter(tmp_path: Path) -> None:
    assert run_isolated(check_manifests, tmp_path) > 150


def open_as_nobody(folder: Path) -> str:
    folder.parent.chmod(0o755)
    folder.chmod(0)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    try:
        ps.TarSource(folder)
    except PenstockError as error:
        return str(error)
    return ""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody who may not read")
def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    make_dataset(tmp_path / "set")
    tmp_path.parent.chmod(0o755)
    said = run_isolated(open_as_nobody, tmp_path / "set")
    (tmp_path / "set").chmod(0o755)
    assert "set" in said
    assert "ermission denied" in said


def test_what_is_in_the_wrong_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder" / MANIFEST).mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    for name in ("folder", "file", "file/x", "x" * 300, f"{'y' * 300}.json", f"{{{'z' * 300}}}.tar", "\ud800", "a\0b"):
        with pytest.raises(PenstockError):
            ps.TarSource(tmp_path / name)


# -- other files -------------------------------------------------------------------------------------------------------


def make_tuning() -> Tuning:
    trials = (Trial(Setting.of("threads", 2, 2), 0.01, 0.1), Trial(Setting.of("inline", 0, 2), 0.02, 0.1))
    return Tuning(trials, 4, 100, 0.01, this_machine(), ("a remark",))


def use_tuning(path: Path) -> None:
    tuning = Tuning.load(path)
    assert str(tuning)
    assert tuning.loader_kwargs()
    tuning.save(path)


def test_a_tuning_with_one_thing_wrong_is_refused_or_does_not_matter(tmp_path: Path) -> None:
    make_tuning().save(tmp_path / "tuning.json")
    stored = json.loads((tmp_path / "tuning.json").read_bytes())
    assert check_all(tmp_path / "tuning.json", stored, lambda: use_tuning(tmp_path / "tuning.json")) > 300


def seal_run(document: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(document, sort_keys=True).encode())


def test_a_run_file_with_one_thing_wrong_is_refused_or_does_not_matter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ps.ArraySource({"x": np.arange(8)})
    with ps.watch(ps.Loader(source, ps.Plan(source.index, ps.Shuffle(), batch_size=4))) as watched:
        assert len(list(watched)) == 2
    path = tmp_path / "run.json"
    watched.save(path)
    stored = json.loads(path.read_bytes())
    del stored["checksum"]
    assert check_all(path, stored, lambda: read_run(path) and None, seal_run, step=11) > 100


LAUGHS = "a0: &a0 [x, x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
YAML = {
    "laughs": LAUGHS,
    "laughs where they matter": f"{LAUGHS}loader:\n  batch_size: *a9\n",
    "cut off": "train: [",
    "no text": b"\xff\xfe\x00",
    "deep": "[" * 2000,
    "deep mappings": "".join(f"{' ' * n}a:\n" for n in range(1500)),
    "a program": "!!python/object/apply:os._exit [3]",
    "itself": "train: &a\n  x: *a\n",
    "a circle": "train:\n  seed: ${train.seed}\n",
    "digits": f"train:\n  seed: {'9' * 5000}\n",
    "twice": "train: {}\ntrain: {}\n",
    "a scalar": "5",
    "nothing": "",
    "a surrogate": 'train:\n  seed: "\\ud800"\n',
    "no dataset": "dataset:\n  _name_: [qautoaudio]\n",
    "too little": "dataset:\n  _name_: qautoaudio\n",
}


@pytest.mark.parametrize("name", YAML)
def test_odd_configurations_are_refused(name: str, tmp_path: Path) -> None:
    content, began = YAML[name], time.monotonic()
    path = tmp_path / "config.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(OptionError):
        build_from_config(path)
    assert time.monotonic() - began < 120


def test_a_configuration_with_one_thing_wrong_is_refused(tmp_path: Path) -> None:
    config = {
        "train": {"train_chunk_size": 10, "val_chunk_size": None, "seed": 1},
        "trainer": {"max_epochs": 3},
        "loader": {"batch_size": 4},
        "dataset": {"_name_": "qautoaudio"},
    }
    path = tmp_path / "config.yaml"
    for what, changed in damage(config):
        path.write_text(yaml.dump(changed))
        with pytest.raises(PenstockError):
            pytest.fail(f"accepted: {what}") if build_from_config(path) else None


# -- full disks --------------------------------------------------------------------------------------------------------


def save_on_a_full_disk(path: Path, n_bytes: int) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, resource.RLIM_INFINITY))
    try:
        make_tuning().save(path)
    except WriteError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("n_bytes", [0, 100])
def test_a_tuning_that_does_not_fit_on_the_disk_leaves_the_one_before(n_bytes: int, tmp_path: Path) -> None:
    make_tuning().save(tmp_path / "tuning.json")
    before = (tmp_path / "tuning.json").read_bytes()
    assert "tuning.json" in run_isolated(save_on_a_full_disk, tmp_path / "tuning.json", n_bytes)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tuning.json"]
    assert (tmp_path / "tuning.json").read_bytes() == before


def note_on_a_full_disk(path: Path, room: int) -> str:
    noted = Quarantine(path, "f", 10)
    noted.add(3, "a.tar", DamageError("a.tar", 3, "a bit"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, resource.RLIM_INFINITY))
    try:
        noted.add(4, "a.tar", DamageError("a.tar", 4, "another"))
    except WriteError as error:
        assert noted.items() == {3}
        return str(error)
    return ""


@pytest.mark.parametrize("room", [0, 1, 40])
def test_a_list_of_bad_items_that_does_not_fit_on_the_disk_keeps_whole_lines(room: int, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    assert f"Could not write the list of bad items {path}" in run_isolated(note_on_a_full_disk, path, room)
    assert [json.loads(line)["item"] for line in path.read_text().splitlines()] == [3]
    assert [entry.name for entry in tmp_path.iterdir()] == ["bad.jsonl"]
