"""Files and states that Penstock itself saves and reads again: written here, then damaged."""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import matplotlib.font_manager
import numpy as np

import penstock as ps
from bench.campaign.fuzz.mutate import Mutation
from bench.campaign.fuzz.structures import mutate_json
from bench.campaign.fuzz.target import (
    HARNESS,
    Run,
    SkippedInput,
    Target,
    WrongValueError,
    clear_folder,
    put_file,
    read_file,
    select_file,
)
from bench.campaign.fuzz.targets.shards import seal_manifest
from penstock.core.errors import (
    DamageError,
    OptionError,
    ResumeError,
    WriteError,
)
from penstock.files.machine import this_machine
from penstock.observe.faults import read_quarantine
from penstock.observe.page import gather_report, render_page
from penstock.observe.run_file import is_run_file, read_run
from penstock.observe.tuning import Setting, Trial, Tuning
from penstock.source.tar.quarantine import Quarantine
from penstock.transform.moments import Moments

__all__ = ["SAVED"]


@cache
def _written() -> Mapping[str, bytes]:
    """Return files of each kind, by their path: a dataset, what is saved beside it, a writer that was killed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        samples = {"number": np.arange(1, 6), "x": np.arange(15, dtype=np.float32).reshape(5, 3)}
        ps.create_shards_from_arrays(folder / "shards", samples, 2, show_progress=False)
        loader = _resumable(folder / "shards", folder / "checkpoint.json")
        list(islice(chain.from_iterable(repeat(loader)), 10))
        source = ps.TarSource(folder / "shards")
        with ps.Loader(source, ps.Plan(source.index, ps.Shuffle(), batch_size=2)) as batches:
            with ps.watch(batches, show=False) as watched:
                for _ in watched:
                    watched.record(loss=float("nan"))
                watched.save(folder / "run.json")
        trials = (Trial(Setting.of("inline"), 0.5, 0.25), Trial(Setting.of("processes", 2, 4), 0.25, 2.0))
        Tuning(trials, 32, 4096, 0.0625, this_machine(), ("One remark.",)).save(folder / "tuning.json")
        Quarantine(folder / "quarantine.jsonl", "ab12", 10).add(1, "a.tar", DamageError("a.tar", 1, "a bit"))
        with _begin_writing(folder / "finished") as writer:
            for number in range(3):
                writer.write_sample(_sample(number))
            shutil.copytree(folder / "finished", folder / "unfinished")
            writer.write_sample(_sample(3))
        found = sorted(path for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def _put_written(folder: Path, part: str) -> Path:
    """Write the files of a part; return their folder."""
    for name, content in _written().items():
        if name.startswith(f"{part}/"):
            with HARNESS:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
            put_file(folder / name, content)
    return folder / part


def _resumable(shards: Path, checkpoint: Path) -> Any:
    return ps.ResumableWebDatasetLoader(shards, checkpoint, checkpoint_interval=2, seed=8, fields=["number"])


def _begin_writing(folder: Path, *, resume: bool = False) -> Any:
    return ps.WebDatasetWriter(folder, shard_size=2, metadata={"subject": "m1"}, resume=resume)


def _sample(number: int) -> dict[str, Any]:
    return {"x": np.float32([2 * number, 2 * number + 1])}


def _stored(*names: str) -> Callable[[], Sequence[bytes]]:
    return lambda: [_written()[name] for name in names]


def _parse_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SkippedInput from error


# -- states ------------------------------------------------------------------------------------------------------------


def _cases(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return what makes a loader of each kind of state, by name."""
    shards = _put_written(folder, "shards")
    source = ps.ArraySource({"x": np.arange(37)}, chunk_items=5)

    def over(order: ps.Order, lanes: int = 1, segment: int = 0) -> Callable[[], Any]:
        plan = ps.Plan(source.index, order, batch_size=4, seed=11, lanes=lanes, tail="drop")
        return lambda: ps.Loader(source, ps.Segments(plan, segment) if segment else plan)

    def load(start: int, stop: int) -> tuple[Any, Any]:
        rows = np.arange(start, stop)[:, None]
        return rows, rows

    return {
        "plan shuffle": over(ps.Shuffle()),
        "plan two lanes: window": over(ps.WindowShuffle(2), lanes=2),
        "plan segments: window": over(ps.WindowShuffle(2), segment=3),
        "plan balanced": over(ps.Balanced(["rare"] * 5 + ["common"] * 32)),
        "chunked sampler": lambda: ps.ChunkedSampler(10, 4, seed=1),
        "chunked loader": lambda: ps.ChunkedDataLoader(list(range(7)), 2, 3, seed=1),
        "random chunks": lambda: ps.RandomChunkLoader(load, 50, 8, "cpu", seed=6, time_units=2),
        "webdataset batches": lambda: ps.create_webdataset_dataloader(
            shards, batch_size=2, num_workers=0, buffer_size=4
        ),
        "any dataset": lambda: ps.CellMapDataLoader(list(range(1, 10)), batch_size=2, rng=2),
    }


def _advance(loader: Any) -> None:
    """Take two batches."""
    if isinstance(loader, ps.RandomChunkLoader):
        loader.start_epoch(4)
        loader.get_next_chunk()
    else:
        list(islice(iter(loader), 2))


def _states() -> Sequence[bytes]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, make in _cases(Path(folder)).items():
            loader = make()
            _advance(loader)
            found.append(f"{name}\n".encode() + json.dumps(loader.state_dict()).encode())
    return found


def _prepare_states(folder: Path) -> Run:
    """Load a state into the loader that its first line names, take two batches, and compare the state it then has."""
    loaders: dict[str, Any] = {}
    cases = _cases(folder)

    def run(content: bytes) -> None:
        name = content.partition(b"\n")[0].decode(errors="replace")
        if name not in cases:
            raise SkippedInput
        state = _parse_json(content.partition(b"\n")[2])
        if name not in loaders:
            loaders[name] = cases[name]()
        loaders[name].load_state_dict(state)
        first = loaders[name].state_dict()
        _advance(loaders[name])
        loaders[name].load_state_dict(json.loads(json.dumps(first)))

    return run


def _read_checkpoint(path: Path) -> None:
    next(iter(_resumable(_put_written(path.parent, "shards"), path)))


# -- results -----------------------------------------------------------------------------------------------------------


def _read_tuning(path: Path) -> None:
    tuning = Tuning.load(path)
    str(tuning)
    json.dumps(tuning.to_dict())
    tuning.loader_kwargs()
    tuning.gain  # noqa: B018  # computed


def _tunings() -> Sequence[bytes]:
    return [_written()["tuning.json"]]


def _prepare_run(folder: Path) -> Run:
    path = folder / "run.json"
    matplotlib.font_manager.get_font_names()  # makes its folders and its cache, as drawing does

    def run(content: bytes) -> None:
        put_file(path, seal_manifest(content))
        is_run_file(path)
        read_run(path)
        render_page(gather_report(run=path))

    return run


def _prepare_quarantine(folder: Path) -> Run:
    path = folder / "quarantine.jsonl"
    fingerprint = json.loads(_written()["quarantine.jsonl"].splitlines()[0])["fingerprint"]

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
    values = np.arange(24.0).reshape(4, 2, 3)
    made = (Moments.over(values), Moments.over(values, axis=0), Moments.over(values, per="scalar"), Moments())
    return [json.dumps(moments.to_json()).encode() for moments in made]


# -- unfinished writes -------------------------------------------------------------------------------------------------


def _unfinished() -> Sequence[bytes]:
    return [f"{name}\n".encode() + content for name, content in _written().items() if name.startswith("unfinished/")]


def _prepare_unfinished(folder: Path) -> Run:
    """Resume a writer that was killed, with one of its files damaged."""

    def run(content: bytes) -> None:
        name = content.partition(b"\n")[0].decode(errors="replace")
        if name not in _written() or not name.startswith("unfinished/"):
            raise SkippedInput
        clear_folder(folder)
        _put_written(folder, "unfinished")
        put_file(folder / name, content.partition(b"\n")[2])
        with _begin_writing(folder / "unfinished", resume=True) as writer:
            for number in range(writer.written, 4):
                writer.write_sample(_sample(number))

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
        "unfinished",
        _prepare_unfinished,
        _unfinished,
        (OptionError, DamageError, WriteError, ResumeError),
        _STATE,
        weight=0.1,
        writes=("*",),
    ),
)
