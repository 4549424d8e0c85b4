"""A training from a web server with a cache folder, which is killed at random moments and resumed."""

import json
import os
import random
from pathlib import Path
from typing import Any

from penstock_remote import Endpoint, serve_http
from penstock_remote_sets import RemoteSet, digest_batch, digests_of, folder_bytes, make_plan, write_set
from penstock_test_killer import Job
from penstock_test_parts import eventually

from penstock import Loader, RunOptions, Shuffle, WindowShuffle
from penstock.files.durable import write_aside

__all__ = ["kill_a_training"]

_EPOCHS = 3


def _make_loader(shards: RemoteSet, place: str, order: Any, workers: int, options: RunOptions) -> Loader:
    source = shards.open(place)
    return Loader(source, make_plan(source, order), num_workers=workers, options=options)


def _train(shards: RemoteSet, order: Any, workers: int, options: RunOptions) -> None:
    """Train to the end, from the last state if there is one; the log has a digest of each batch."""
    log, saved = shards.cache.with_name("log"), shards.cache.with_name("state.json")
    with _make_loader(shards, "http cached", order, workers, options) as loader, log.open("a") as out:
        stored = json.loads(saved.read_text()) if saved.exists() else {"logged": 0}
        if "loader" in stored:
            loader.load_state_dict(stored["loader"])
        os.truncate(log, stored["logged"])  # a batch was logged, and the kill came before the state was saved
        while loader.epoch < _EPOCHS:
            for batch in loader:
                out.write(json.dumps(digest_batch(batch)) + "\n")
                out.flush()
                state = {"loader": loader.state_dict(), "logged": log.stat().st_size}
                write_aside(saved, json.dumps(state).encode(), lasting=False)


def _count_lines(shards: RemoteSet) -> int:
    log = shards.cache.with_name("log")
    return log.read_bytes().count(b"\n") if log.exists() else 0


def kill_a_training(rng: random.Random, folder: Path, kills: int, kill: Any) -> None:
    """Kill a training `kills` times, and finish it: the batches of local shards, a cache within its bound, and right.

    Parameters
    ----------
    kill
        `kill(job, seconds, whom, rng)` kills a job after some time and returns its answer.
    """
    (folder / "served").mkdir(parents=True)
    with serve_http(folder / "served") as http:
        shards = write_set(folder / "local", 48, http=http).with_cache(rng.choice((0.4, 0.7, 1.2)))
        _kill_and_finish(rng, shards, kills, kill)
        _check_cache(shards, http)


def _kill_and_finish(rng: random.Random, shards: RemoteSet, kills: int, kill: Any) -> None:
    order = rng.choice((Shuffle(), WindowShuffle(2)))
    with _make_loader(shards, "local", order, 0, RunOptions()) as loader:
        expected = digests_of(loader, _EPOCHS)
    ways = [(2, RunOptions(executor="threads")), (2, RunOptions(executor="processes", start_method="fork"))]
    log, saved = shards.cache.with_name("log"), shards.cache.with_name("state.json")
    n_killed = n_tries = 0  # a kill that comes after the end is none
    while n_killed < kills:
        n_tries += 1
        assert n_tries <= 20 * kills, f"{n_killed} of {n_tries} kills came before the end"
        workers, options = rng.choice(ways)
        lines = _count_lines(shards)
        if lines == len(expected):
            _check_log(log, expected)
            log.unlink()
            saved.unlink()  # another training, with the cache of the one before
            lines = 0
        job = Job(_train, job={"shards": shards, "order": order, "workers": workers, "options": options}, clock="time")
        if rng.random() < 0.7:  # otherwise, while it starts
            assert eventually(lambda lines=lines: _count_lines(shards) not in (lines, 0), 90)
        answer = kill(job, rng.expovariate(1 / 0.03), rng.choice(("process", "everyone", "child")), rng)
        assert not answer.get("error"), answer
        n_killed += _count_lines(shards) < len(expected)
        assert folder_bytes(shards.cache) <= (shards.cache_bytes or 0) + 4096, "the bound of the cache"
    _train(shards, order, 2, RunOptions(executor="threads"))
    _check_log(log, expected)


def _check_log(log: Path, expected: list[Any]) -> None:
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    assert logged == json.loads(json.dumps(expected)), f"{len(logged)} batches instead of {len(expected)}, or others"


def _check_cache(shards: RemoteSet, http: Endpoint) -> None:
    """Read everything once more, from what the cache has and the server: the same bits."""
    http.reset_counts()
    with _make_loader(shards, "local", Shuffle(), 0, RunOptions()) as loader:
        expected = digests_of(loader, 1)
    with _make_loader(shards, "http cached", Shuffle(), 0, RunOptions()) as loader:
        assert digests_of(loader, 1) == expected
