"""A watch shows what was downloaded while it ran, and a run file keeps it."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from penstock_download_parts import ITEM_BYTES, CountedDownloads
from torch import arange
from torch.utils.data import DataLoader, TensorDataset

from penstock import (
    DamageError,
    Loader,
    Plan,
    RunOptions,
    Sequential,
    Shuffle,
    TarSource,
    create_shards_from_arrays,
)
from penstock.observe.advice import advise, live_line, summary
from penstock.observe.loader_facts import Downloads, restarts_workers, try_len
from penstock.observe.run_file import read_run
from penstock.observe.watcher import Watch, watch

N_ITEMS, MISSING = 80, 60
EXPECTED = {
    "download_bytes": MISSING * ITEM_BYTES,
    "download_requests": MISSING,
    "download_retries": 8,
    "download_hidden_seconds": 0.25 * MISSING,
    "download_waited_seconds": 0.125 * MISSING,
    "cache_hits": 20,
    "cache_misses": MISSING,
    "cache_hit_fraction": 0.25,
}


def make_loader(**options: Any) -> Loader:
    source = CountedDownloads(N_ITEMS)
    plan = Plan(source.index, Shuffle(), batch_size=4)
    return Loader(source, plan, num_workers=2, options=RunOptions(executor="threads", **options))


def watch_epoch(loader: Any, **options: Any) -> Watch[Any]:
    with watch(loader, **{"show": False, **options}) as watched:
        for _ in watched:
            pass
    return watched


def downloads_of(watched: Watch[Any]) -> dict[str, Any]:
    return {name: value for name, value in watched.to_dict().items() if name in EXPECTED}


def test_the_figures_are_those_of_the_time_that_was_watched() -> None:
    loader = make_loader()
    list(loader)
    assert downloads_of(watch_epoch(loader)) == EXPECTED


@pytest.mark.parametrize("wrap", [lambda loader: SimpleNamespace(loader=loader, __iter__=None), lambda loader: loader])
def test_a_loader_that_wraps_another_has_its_downloads(wrap: Any) -> None:
    loader = make_loader()
    counted = Downloads(wrap(loader))
    list(loader)
    assert counted.update() == EXPECTED["download_bytes"]
    assert counted.update() == 0
    assert counted.figures() == EXPECTED


def test_a_loader_of_local_data_has_no_such_figures() -> None:
    local = DataLoader(TensorDataset(arange(8)), batch_size=4)
    assert downloads_of(watch_epoch(local)) == {}
    assert "download" not in str(watch_epoch([1, 2, 3]))
    assert not Downloads(None).is_remote


def test_the_summary_says_how_much_of_it_was_hidden() -> None:
    out = io.StringIO()
    watch_epoch(make_loader(), show=None, out=out)
    assert (
        "Downloads: 60 kB in 60 requests, 8 retries, 25 % from the cache; 67 % of the download time was hidden "
        "(7.5 s waited)\n"
    ) in out.getvalue()


def test_without_any_download_the_summary_says_so_and_does_not_divide() -> None:
    watched = watch_epoch(make_loader())
    nothing = dict.fromkeys(EXPECTED, 0) | {"cache_hit_fraction": None}
    assert "Downloads: 0 bytes in 0 requests\n" in summary({**watched.to_dict(), **nothing})


def test_the_live_line_has_the_bytes() -> None:
    assert ", 60 kB downloaded" in live_line(watch_epoch(make_loader()).to_dict(), 20)


def test_a_logger_gets_what_was_downloaded_so_far() -> None:
    logged: list[dict[str, float]] = []
    watched = watch_epoch(make_loader(), log=lambda values, step: logged.append(values))
    found = watched.to_dict()
    assert logged[-1]["data/downloaded_mb"] == 0.06
    assert logged[-1]["data/download_requests"] == found["download_requests"] > 0
    assert logged[-1]["data/cache_hit_fraction"] == found["cache_hit_fraction"]


def test_a_logger_gets_how_many_items_are_in_quarantine(tmp_path: Path) -> None:
    create_shards_from_arrays(tmp_path, {"x": np.arange(12.0).reshape(12, 1)}, shard_size=4)
    shard = sorted(tmp_path.glob("*.tar"))[1]
    content = bytearray(shard.read_bytes())
    for place in (np.float64(5.0), np.float64(6.0)):
        at = content.index(place.tobytes())
        content[at : at + 8] = b"\xff" * 8
    shard.write_bytes(content)
    source = TarSource(tmp_path, on_error="substitute", max_bad_items=3)
    loader = Loader(source, Plan(source.index, Sequential(), batch_size=2))
    logged: list[float] = []
    with watch(
        loader, log=lambda values, _: logged.append(values["data/quarantined_items"]), log_every_steps=1, show=False
    ) as w:
        for _ in w:
            pass
    assert len(logged) == 6
    assert logged == sorted(logged)
    assert logged[-1] == 2


def figures(wait_fraction: float, waited: float) -> dict[str, Any]:
    known = watch_epoch(make_loader()).to_dict()
    return {
        **known, "wait_fraction": wait_fraction, "wait_p50_ms": 1.0, "wait_mean_ms": 1.0, "wait_max_ms": 1.0,
        "batches_per_second": 10.0, "elapsed_seconds": 2.0, "download_hidden_seconds": 10.0,
        "download_waited_seconds": waited,
    }  # fmt: skip


def test_the_advice_names_the_cache_if_the_training_waits_for_downloads() -> None:
    (line,) = [
        line for line in [str(f) for f in advise(figures(0.4, 5.0), restarts_workers=False)] if "download" in line
    ]
    assert line.startswith("Reads waited 5 s for downloads, which came at 30 kB/s.")
    assert "cache_bytes=" in line
    assert "penstock inspect URL --cache SIZE" in line


@pytest.mark.parametrize(("wait_fraction", "waited"), [(0.01, 5.0), (0.4, 0.5), (0.995, 5.0)])
def test_there_is_no_such_advice_if_it_would_not_help(wait_fraction: float, waited: float) -> None:
    assert "Reads waited" not in str([str(f) for f in advise(figures(wait_fraction, waited), restarts_workers=False)])


# -- run files ---------------------------------------------------------------------------------------------------------


def rewrite(path: Path, change: Any) -> None:
    stored = json.loads(path.read_text())
    del stored["checksum"]
    change(stored)
    stored["checksum"] = xxhash.xxh3_64_hexdigest(json.dumps(stored, sort_keys=True).encode())
    path.write_text(json.dumps(stored))


def test_a_run_file_keeps_figures_and_course_of_the_downloads(tmp_path: Path) -> None:
    watch_epoch(make_loader()).save(tmp_path / "run.json")
    run = read_run(tmp_path / "run.json")
    assert {name: run.figures[name] for name in EXPECTED} == EXPECTED
    assert run.traces["download"].total.sum() == EXPECTED["download_bytes"]


def test_a_run_file_without_downloads_is_read(tmp_path: Path) -> None:
    watch_epoch([np.arange(3)]).save(tmp_path / "run.json")
    rewrite(tmp_path / "run.json", lambda stored: stored["traces"].pop("download"))
    run = read_run(tmp_path / "run.json")
    assert len(run.traces["download"]) == 0
    assert "download_bytes" not in run.figures


@pytest.mark.parametrize("value", ["many", None])
def test_a_run_file_with_half_of_the_figures_is_refused(tmp_path: Path, value: Any) -> None:
    watch_epoch(make_loader()).save(tmp_path / "run.json")

    def change(stored: dict[str, Any]) -> None:
        stored["figures"]["cache_hits"] = value

    rewrite(tmp_path / "run.json", change)
    with pytest.raises(DamageError, match="cache_hits must be a number"):
        read_run(tmp_path / "run.json")


# -- other facts -------------------------------------------------------------------------------------------------------


def test_a_length_that_is_not_there_is_unknown() -> None:
    assert try_len([1, 2]) == 2
    assert try_len(iter([])) is None


def test_only_a_loader_that_could_keep_its_workers_restarts_them() -> None:
    assert restarts_workers(SimpleNamespace(num_workers=2, persistent_workers=False))
    assert not restarts_workers(SimpleNamespace(num_workers=2, persistent_workers=True))
    assert not restarts_workers(SimpleNamespace(num_workers=0, persistent_workers=False))
    assert not restarts_workers(make_loader())
