"""Files that Penstock itself saves and reads again.

The files that an earlier version wrote (`tests/compatibility`) are the inputs to begin with.
"""

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.core.errors import (
    DamageError,
    OptionError,
    ResumeError,
    WriteError,
)
from penstock.files.machine import this_machine
from penstock.observe.faults import read_quarantine
from penstock.observe.run_file import is_run_file, read_run
from penstock.recipes.tune.tuning import Tuning
from penstock.report.build import gather_report
from penstock.report.page.render import render_page
from penstock.source.tar.quarantine import Quarantine
from penstock.transform.moments import Moments
from tests.campaign.fuzz.mutate import Mutation
from tests.campaign.fuzz.structures import mutate_json
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


_JSON: tuple[Mutation, ...] = (mutate_json, mutate_json)
_STATE: tuple[Mutation, ...] = (select_file(mutate_json), select_file(mutate_json))

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
)
