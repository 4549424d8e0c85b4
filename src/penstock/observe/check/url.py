"""A dataset or a zarr store at a URL: whether its server answers, how fast, and what is there. Nothing is written."""

import shlex
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from penstock.core.errors import DamageError, PenstockError, SourceError
from penstock.core.text import cause, count
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.store import open_store
from penstock.files.stores.url import Url
from penstock.observe.check.dataset import list_some
from penstock.observe.finding import Finding, Progress
from penstock.shard.places.open_dataset import open_dataset
from penstock.shard.summary import find_problems
from penstock.source.stored.folders import Folders
from penstock.source.stored.open_array import open_array
from penstock.source.stored.zarr.group import find_arrays

__all__ = ["examine_url"]

_DEADLINE_SECONDS = 20.0  # for each request: a server that is down must not take minutes
_N_REQUESTS = 5
_PIECE_BYTES, _MOST_PIECES, _MOST_SECONDS = 4 << 20, 8, 2.0
_MOST_ARRAYS = 20
_REACH = "Check the address, the endpoint, the region and the credentials. A public bucket is read without any."


def examine_url(url: Url, options: StoreOptions | None, progress: Progress) -> Iterator[Finding]:
    """Yield findings on what is at a URL.

    Parameters
    ----------
    options
        How it is reached; None: by the environment.
    """
    given = options or StoreOptions()
    store = replace(given, deadline_seconds=min(given.deadline_seconds, _DEADLINE_SECONDS))
    progress("Asking the server", "requests", 0, 0, str(url))
    try:
        manifest, archives = open_dataset(url, store=store)
        assert archives is not None, "a URL was given"
        yield from _examine_requests(archives.url, manifest.shards[0].name if manifest.shards else "", store)
        size = sum(map(int, manifest.table.stored_bytes))
        items, shards = count(manifest.n_items, "item"), count(len(manifest.shards), "shard")
        found = f"{items} in {shards}, {size / 1e6:,.1f} MB; the manifest is whole."
        facts = {"items": manifest.n_items, "shards": len(manifest.shards), "bytes": size}
        facts_of_it: dict[str, Any] = {**facts, "fingerprint": manifest.fingerprint}
        yield Finding("data.manifest", "ok", found, facts=facts_of_it)
        yield _judge_shards(url, find_problems(manifest, archives))
        archives.close()
    except SourceError as error:
        yield from _examine_store(url, store, error)
    except DamageError as error:
        yield Finding("data.manifest", "problem", cause(error), "Upload it again.")
    except PenstockError as error:
        yield Finding("storage.requests", "problem", cause(error), _REACH)


def _judge_shards(url: Url, problems: list[str]) -> Finding:
    facts = {"problems": problems[:100]}
    if not problems:
        return Finding("data.shards", "ok", "All shards are there, with the right sizes.", facts=facts)
    found = f"{count(len(problems), 'shard')} of the manifest: {list_some(problems)}."
    command = f"penstock check {shlex.quote(str(url))} --all"
    return Finding("data.shards", "problem", found, "Upload them again.", command, facts)


def _examine_requests(url: Url, name: str, options: StoreOptions) -> Iterator[Finding]:
    """Yield how long the server takes to answer, and how fast one connection is."""
    store = open_store(url, options)
    waits = []
    for _ in range(_N_REQUESTS):
        began = time.perf_counter()
        size = store.describe(name).n_bytes
        waits.append(time.perf_counter() - began)
    speeds, until = [], time.perf_counter() + _MOST_SECONDS
    n_bytes = min(size, _PIECE_BYTES)
    for begin in range(0, size - n_bytes + 1, max(1, n_bytes))[:_MOST_PIECES]:
        began = time.perf_counter()
        store.read_range(name, begin, n_bytes)
        speeds.append(n_bytes / (time.perf_counter() - began))
        if time.perf_counter() > until:
            break
    wait, speed = statistics.median(waits), statistics.median(speeds) if speeds else 0.0
    found = (
        f"{url} answers in {1000 * wait:,.0f} ms (median of {_N_REQUESTS}); one connection reads {speed / 1e6:,.0f} "
        f"MB/s, in pieces of {n_bytes / 1e6:,.1f} MB. A loader has {options.connections}."
    )
    facts = {"seconds": waits, "bytes_per_second": speed, "piece_bytes": n_bytes, "pieces": len(speeds)}
    yield Finding("storage.requests", "ok", found, facts=facts)


def _examine_store(url: Url, options: StoreOptions, missing: SourceError) -> Iterator[Finding]:
    """Yield findings on the arrays of a zarr store; if it is none, what was said about the dataset."""
    try:
        folder = Folders(store=options).open(str(url))
        names = find_arrays(folder)
        listed = [""] if names is None else names
        opened = {name: open_array(folder / name if name else folder) for name in listed[:_MOST_ARRAYS]}
        shapes = [f"{name or 'the array'} {array.dtype} {array.shape}" for name, array in opened.items()]
    except SourceError:
        yield Finding("data.kind", "problem", cause(missing), "Check the URL.")
        return
    except PenstockError as error:
        yield Finding("storage.requests", "problem", cause(error), _REACH)
        return
    found = f"A zarr store of {count(len(listed), 'array')}; can be opened: {list_some(shapes)}."
    yield Finding("data.store", "ok", found, facts={"arrays": shapes})
