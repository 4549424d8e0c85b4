"""Files that Penstock itself saves and reads again, and tables and texts that people write.

The files that an earlier version wrote (`tests/compatibility`) are the inputs to begin with.
"""

import io
import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from penstock.convert.splits import Split, parse_split
from penstock.convert.table import read_table
from penstock.core.errors import (
    DamageError,
    OptionError,
    ReadError,
    ResumeError,
    SourceError,
    WriteError,
)
from penstock.observe.faults import read_quarantine
from penstock.observe.machine import this_machine
from penstock.observe.run_file import is_run_file, read_run
from penstock.recipes.cellmap.multi import CellMapDataSplit
from penstock.recipes.crossval.cross_validation import _read_file as read_features
from penstock.recipes.tune.tuning import Tuning
from penstock.report.build import gather_report
from penstock.report.page.render import render_page
from penstock.source.tar.quarantine import Quarantine
from penstock.transform.moments import Moments
from tests.campaign.fuzz.mutate import Mutation
from tests.campaign.fuzz.structures import mutate_json, mutate_npy, mutate_zip
from tests.campaign.fuzz.target import (
    Run,
    SkippedInput,
    Target,
    WrongValueError,
    clear_folder,
    copy_folder,
    put_file,
    read_file,
    select_file,
)
from tests.campaign.fuzz.targets.shards import seal_manifest

_COMPATIBILITY = Path(__file__).parents[3] / "compatibility"
sys.path.insert(0, str(_COMPATIBILITY))
import parts_compatibility as parts  # noqa: E402
from parts_states import plan_cases, recipe_cases, restore, source_cases, state_of  # noqa: E402

__all__ = ["SAVED"]

WRITTEN = parts.WRITTEN


def _stored(*names: str) -> Callable[[], Sequence[bytes]]:
    return lambda: [(WRITTEN / name).read_bytes() for name in names]


def _parse_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SkippedInput from error


# -- states ------------------------------------------------------------------------------------------------------------


@cache
def _cases() -> dict[str, Any]:
    found = {**plan_cases(), **recipe_cases(WRITTEN), **source_cases(WRITTEN)}
    kept = ("plan shuffle", "plan window", "plan segments: window", "plan two lanes: window", "plan balanced")
    return {
        name: case
        for name, case in found.items()
        if not name.startswith(("plan ", "source ")) or name in (*kept, "source tar")
    }


def _states() -> Sequence[bytes]:
    stored: dict[str, Any] = {}
    for name in ("plans", "recipes", "sources"):
        stored |= json.loads((WRITTEN / "states" / f"{name}.json").read_text())
    return [f"{name}\n".encode() + json.dumps(stored[name]["state"]).encode() for name in _cases() if name in stored]


def _prepare_states(_: Path) -> Run:
    """Load a state into the loader that its first line names, take two batches, and compare the state it then has."""
    loaders: dict[str, Any] = {}

    def run(content: bytes) -> None:
        name = content.partition(b"\n")[0].decode(errors="replace")
        if name not in _cases():
            raise SkippedInput
        state = _parse_json(content.partition(b"\n")[2])
        case = _cases()[name]
        if name not in loaders:
            loaders[name] = case.make()
        restore(loaders[name], state)
        first = state_of(loaders[name])
        list(islice(case.stream(loaders[name]), 2))
        restore(loaders[name], json.loads(json.dumps(first)))

    return run


def _read_checkpoint(path: Path) -> None:
    loader = parts.resumable(WRITTEN, path)
    next(iter(loader))


# -- results -----------------------------------------------------------------------------------------------------------


def _read_tuning(path: Path) -> None:
    tuning = Tuning.load(path)
    str(tuning)
    json.dumps(tuning.to_dict())
    tuning.loader_kwargs()
    tuning.gain  # noqa: B018  # computed


def _tunings() -> Sequence[bytes]:
    content = json.loads((WRITTEN / "tuning.json").read_text())
    content["machine"]["cpus"] = this_machine().cpus
    return [json.dumps(content).encode()]


def _prepare_run(folder: Path) -> Run:
    path = folder / "run.json"

    def run(content: bytes) -> None:
        put_file(path, seal_manifest(content))
        is_run_file(path)
        read_run(path)
        render_page(gather_report(run=path))

    return run


def _prepare_quarantine(folder: Path) -> Run:
    path = folder / "quarantine.jsonl"
    fingerprint = json.loads((WRITTEN / "quarantine.jsonl").read_text().splitlines()[0])["fingerprint"]

    def run(content: bytes) -> None:
        put_file(path, content)
        items = Quarantine(path, fingerprint, 10).items()
        noted = read_quarantine(path, fingerprint)
        if noted["count"] != len(items):
            raise WrongValueError(f"{len(items)} items in quarantine, but {noted['count']} in the report")
        Quarantine(path, fingerprint, 10**9).add(3, "a.tar", DamageError("a.tar", 3, "a bit"))
        if 3 not in Quarantine(path, fingerprint, 10).items():
            raise WrongValueError("an item that was added is not in the list")

    return run


def _prepare_moments(_: Path) -> Run:
    def run(content: bytes) -> None:
        moments = Moments.from_json(_parse_json(content))
        again = Moments.from_json(json.loads(json.dumps(moments.to_json())))
        if json.dumps(again.to_json()) != json.dumps(moments.to_json()):
            raise WrongValueError("moments differ after writing and reading")

    return run


def _moments() -> Sequence[bytes]:
    return [json.dumps(entry).encode() for entry in json.loads((WRITTEN / "moments.json").read_text()).values()]


# -- unfinished writes -------------------------------------------------------------------------------------------------


def _unfinished_files() -> dict[str, bytes]:
    folder = WRITTEN / "unfinished"
    found = sorted(path for name in ("writer", "publish") for path in (folder / name).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def _unfinished() -> Sequence[bytes]:
    return [name.encode() + b"\n" + content for name, content in _unfinished_files().items()]


def _prepare_unfinished(folder: Path) -> Run:
    """Resume a writer that was killed, with one of its files damaged."""

    def run(content: bytes) -> None:
        name = content.partition(b"\n")[0].decode(errors="replace")
        if name not in _unfinished_files():
            raise SkippedInput
        clear_folder(folder)
        which = name.partition("/")[0]
        copy_folder(WRITTEN / "unfinished" / which, folder / which)
        put_file(folder / name, content.partition(b"\n")[2])
        begin = parts.begin_unfinished if which == "writer" else parts.begin_unpublished
        with begin(folder / which, resume=True) as writer:
            for number in range(writer.written, 4):
                writer.write_sample(parts.unfinished_sample(number))

    return run


# -- tables and texts --------------------------------------------------------------------------------------------------

_TABLES = (
    b"name,age,label\na,1,x\nb,2.5,y\n",
    b'name;age\n"a;b";1\n',
    b",x\n0,1e5\n1,nan\n",
    "\ufeffä\tb\n1\t2\n".encode(),
)


@cache
def _parquets() -> Sequence[bytes]:
    table = pa.table({"a": [1, 2, None], "b": ["x", "y", "z"], "c": [[1.5], [], None]})
    out = pa.BufferOutputStream()
    parquet.write_table(table, out)
    return [out.getvalue().to_pybytes()]


def _read_split(path: Path) -> None:
    CellMapDataSplit.from_csv(path)


def _prepare_text(_: Path) -> Run:
    def run(content: bytes) -> None:
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise SkippedInput from error
        split = Split(parse_split(text))
        if abs(sum(share for _, share in split.shares) - 1) > 1e-5:
            raise WrongValueError("the shares do not add up to 1")

    return run


def _features() -> Sequence[bytes]:
    out = io.BytesIO()
    np.savez(out, features=np.arange(8.0).reshape(4, 2), labels=np.array([0, 1, 0, 1]), authors=np.array(list("abab")))
    return [out.getvalue()]


_JSON: tuple[Mutation, ...] = (mutate_json, mutate_json)
_STATE: tuple[Mutation, ...] = (select_file(mutate_json), select_file(mutate_json))
_SPLITS = (b"split,raw,gt\ntrain,/a/b,/c/d\nvalidate,/e,/f\n", b"train,/a,b,/c,d\n")

SAVED = (
    Target("state", _prepare_states, _states, (ResumeError,), _STATE, (b"null", b"1" + b"0" * 30), weight=1),
    Target(
        "checkpoint",
        read_file("checkpoint.json", _read_checkpoint),
        _stored("checkpoint.json"),
        (ResumeError,),
        _JSON,
        weight=0.3,
        writes=("*",),
    ),
    Target("tuning", read_file("tuning.json", _read_tuning), _tunings, (OptionError,), _JSON),
    Target("run", _prepare_run, _stored("run.json"), (OptionError, DamageError), _JSON, weight=0.3),
    Target(
        "quarantine",
        _prepare_quarantine,
        _stored("quarantine.jsonl"),
        (OptionError, DamageError),
        _JSON,
        (b"\n",),
        writes=("quarantine.jsonl",),
    ),
    Target("moments", _prepare_moments, _moments, (OptionError,), _JSON),
    Target(
        "folds",
        read_file("folds.json", parts.found_folds),
        _stored("folds.json"),
        (OptionError,),
        _JSON,
        weight=0.1,
        writes=("*",),
        warnings=("`from penstock import",),
    ),
    Target(
        "unfinished",
        _prepare_unfinished,
        _unfinished,
        (OptionError, DamageError, WriteError, ResumeError),
        _STATE,
        weight=0.1,
        writes=("*",),
    ),
    Target(
        "table",
        read_file("x.csv", read_table),
        lambda: _TABLES,
        (SourceError, ReadError),
        (),
        (b'"', b"\0", b"9" * 400),
        weight=1,
    ),
    Target("parquet", read_file("x.parquet", read_table), _parquets, (SourceError, ReadError), weight=0.5),
    Target(
        "features",
        read_file("x.npz", read_features),
        _features,
        (SourceError, ReadError),
        (mutate_zip(mutate_npy),),
        weight=0.5,
    ),
    Target(
        "split-csv",
        read_file("x.csv", _read_split),
        lambda: _SPLITS,
        (OptionError,),
        (),
        (b'"', b"\0", b","),
        weight=0.3,
    ),
    Target(
        "split-text",
        _prepare_text,
        lambda: [b"train=0.8,val=0.2", b"a=1"],
        (OptionError,),
        (),
        (b"nan", b"inf", b"1e-400", b"=", b","),
        weight=0.3,
    ),
)
