"""A mixture of three shard datasets, beside one dataset of the same number of items.

Items are those of `bench.shards`. Reading is from a warm page cache, batch 32, tensors out; the second epoch counts, of
which nothing needs to be verified. The datasets of the mixture have 1/2, 1/3 and 1/6 of the items, and those weights,
so that both visit as many. Then: how long it takes to begin, and to resume, with a billion items.
"""

import time
from dataclasses import replace
from pathlib import Path

import penstock as ps
from bench.delivery import BATCH, epoch_rate
from bench.measure import Contender, Result, Time, alone, measured, report
from bench.shard_data import warm
from bench.shards import SIZES, store_penstock

__all__ = ["run"]

WEIGHTS = (3, 2, 1)
MANY = (600_000_007, 300_000_011, 100_000_007)


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    results: list[Result] = []
    for name, (shapes, n_items, shard_size) in SIZES.items():
        whole = folder / f"shards-{name}"
        parts = [folder / f"mixed-{name}-{weight}" for weight in WEIGHTS]
        sizes = [n_items * weight // sum(WEIGHTS) for weight in WEIGHTS]
        for path, size in zip([whole, *parts], [n_items, *sizes], strict=True):
            if not (path / "dataset_metadata.json").exists():
                store_penstock(path, shapes, size, shard_size)
        contenders = [
            Contender(f"{what}, {f'{workers} threads' if workers else 'inline'}", rate, (paths, list(shapes), workers))
            for workers in (0, 2)
            for what, paths in (("one dataset", [whole]), ("mixture of three", parts))
        ]
        for pair in (contenders[:2], contenders[2:]):
            results += [replace(result, name=f"{name}: {result.name}") for result in measured(pair, repeats)]
    report(out, "mixtures", results)
    report(out, "mixtures start", alone(measure_start))


def rate(paths: list[Path], fields: list[str], num_workers: int) -> float:
    """Iterate a loader over shards, or a mixture of them; the second epoch counts."""
    for path in paths:
        warm(path)
    sources = {path.name: ps.TarSource(path, fields=fields) for path in paths}
    source = ps.Mixture(sources) if len(paths) > 1 else next(iter(sources.values()))
    order = source.order if isinstance(source, ps.Mixture) else ps.Shuffle()
    plan = ps.Plan(source.index, order, batch_size=BATCH, seed=1, tail="drop")
    options = ps.RunOptions(executor="threads" if num_workers else "auto")
    with ps.Loader(source, plan, num_workers=num_workers, options=options) as loader:
        for _ in loader:
            pass
        return epoch_rate(loader)


def measure_start() -> list[Time]:
    """Make a plan over a billion items, and its first and last batches."""
    from penstock.plan.mixed.order import Mixed, MixedPart  # there are no items, only their numbers
    from penstock.plan.mixed.weights import count_weights

    began = time.perf_counter()
    parts = tuple(MixedPart(f"{n}", ps.Index.uniform(n), ps.Shuffle()) for n in MANY)
    order = Mixed(parts, ((0, count_weights([0.123456, 0.654321, 0.222223])),))
    index = ps.Index.concat([part.index for part in parts], identity="many")
    plan = ps.Plan(index, order, batch_size=BATCH, seed=1)
    plan.epoch(0).draw(0)
    first = time.perf_counter() - began
    began = time.perf_counter()
    plan.epoch(7).draw(plan.n_batches - 1)
    later = time.perf_counter() - began
    found = {"weights, schedule, plan and batch 0": 1000 * first, "the last batch of epoch 7": 1000 * later}
    return [Time(name, ms, ms, ms) for name, ms in found.items()]
