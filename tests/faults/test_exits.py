"""A program that ends with open loaders, sources, writers and iterators, in whatever state, prints nothing."""

from pathlib import Path

from penstock_test_parts import start_script

SCRIPT = """
import logging, sys, threading
from pathlib import Path

import numpy as np
from penstock_test_parts import fork_cases, numbered_source
import penstock as ps
from penstock.recipes.webdataset import WebDatasetWriter

OPTIONS = {
    "inline": (0, ps.RunOptions()),
    "threads": (2, ps.RunOptions(executor="threads")),
    "auto": (2, ps.RunOptions(executor="auto", start_method="fork")),
    "fork": (2, ps.RunOptions(executor="processes", start_method="fork")),
    "persistent": (2, ps.RunOptions(executor="processes", start_method="fork", persistent=True)),
}
FOLDER = Path(sys.argv[1])
SOURCE = numbered_source(4000)


def take_time(item, rng):
    threading.Event().wait(0.001)
    return item


def fail_late(item, rng):
    if item["x"] == 9:
        raise ValueError("this one")
    return item


def make(executor, transform=take_time, source=SOURCE):
    workers, options = OPTIONS[executor]
    plan = ps.Plan(source.index, ps.Sequential(), batch_size=2)
    return ps.Loader(source, plan, transform=transform, num_workers=workers, options=options)


def leave(executor):
    global loader, batches
    loader = make(executor)
    batches = iter(loader)
    next(batches)


def leave_in_a_cycle(executor):
    held = {"loader": make(executor)}
    held["batches"], held["self"] = iter(held["loader"]), held
    next(held["batches"])


def leave_after_an_error(executor):
    global loader, kept
    loader = make(executor, fail_late)
    try:
        list(loader)
    except ValueError as error:
        kept = error


def leave_in_a_thread(executor):
    begun = threading.Event()

    def consume():
        for batch in make(executor):
            begun.set()

    threading.Thread(target=consume, daemon=True).start()
    begun.wait()


def leave_a_watch(executor):
    global watched, batches
    watched = ps.watch(make(executor))
    watched.__enter__()
    batches = iter(watched)
    next(batches)


def leave_a_large_batch(executor):
    global loader, batch
    source = ps.ArraySource({"x": np.zeros((20, 50_000))})
    loader = make(executor, None, source)
    batch = next(iter(loader))


def leave_shards(executor):
    global writer, source, loader, batches
    ps.create_shards_from_arrays(FOLDER / executor, {"x": np.arange(40)}, shard_size=10, show_progress=False)
    source = ps.TarSource(FOLDER / executor)
    loader = make(executor, source=source)
    batches = iter(loader)
    next(batches)
    writer = WebDatasetWriter(FOLDER / f"unfinished {executor}", shard_size=3)
    for number in range(4):
        writer.write_sample({"x": np.full(3, number)})


CASES = [
    (leave, "inline"),
    (leave_in_a_cycle, "persistent"),
    (leave_after_an_error, "threads"),
    (leave_after_an_error, "fork"),
    (leave_in_a_thread, "inline"),
    (leave_in_a_thread, "threads"),
    (leave_in_a_thread, "fork"),
    (leave_a_watch, "threads"),
    (leave_a_large_batch, "inline"),
    (leave_shards, "fork"),
]


if __name__ == "__main__":
    # On a busy machine, a first batch may take longer than the log stays silent about it.
    logging.lastResort.addFilter(lambda record: not record.getMessage().startswith("Still waiting"))
    logging.getLogger("penstock").addFilter(lambda record: "still reading" not in record.getMessage())
    case, executor = fork_cases(CASES, sys.argv[1])
    case(executor)
    print(case.__name__, executor, flush=True)
"""


def test_a_program_that_leaves_everything_open_prints_nothing(tmp_path: Path) -> None:
    with start_script(tmp_path, SCRIPT, str(tmp_path), env={"PYTHONWARNINGS": "ignore::ResourceWarning"}) as process:
        out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, ""), f"exit code {process.returncode}\n{err}"
    assert len(out.splitlines()) == 10
