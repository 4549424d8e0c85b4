"""A process in which only what `pip install penstock` brings can be imported; started by `test_bare_install.py`.

Reads from stdin which top-level packages there are not, and prints as JSON what happened.
"""

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Hidden:
    """Packages that are installed here, and would not be in a bare install."""

    def __init__(self, names: list[str]) -> None:
        self.names = set(names)

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def loaded() -> dict[str, Any]:
    """Write shards and load them, in this process and with a worker process."""
    import numpy as np

    import penstock as ps

    data = {"x": np.arange(40, dtype=np.float32).reshape(20, 2), "label": np.arange(20)}
    ps.create_shards_from_arrays("shards", data, shard_size=6)
    found = {}
    for workers in (0, 1):
        with ps.create_webdataset_dataloader("shards", batch_size=5, num_workers=workers, shuffle=False) as loader:
            batches = list(loader)
        found[str(workers)] = {name: np.concatenate([batch[name] for batch in batches]).tolist() for name in data}
    return found


def commands() -> dict[str, list[Any]]:
    """Run commands; return the exit code of each, and what was said."""
    from penstock.cli import app

    Path("session.nwb").touch()
    said = {}
    for line in (
        "--help",
        "check shards --all",
        "inspect shards --png a.png",
        "convert shards -o again",
        "convert session.nwb -o out",
    ):
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                app(line.split())
            except SystemExit as ended:
                said[line] = [ended.code, out.getvalue(), errors.getvalue()]
    return said


def refusals(hidden: Hidden, with_zarr: list[str]) -> dict[str, list[str]]:
    """Ask for what each extra is for; return the error, by extra."""
    import penstock as ps
    from penstock.convert.formats import inputs_of
    from penstock.convert.table import read_table
    from penstock.observe.picture import plot_item
    from penstock.shard.decoders.decode import decode

    def read_remote() -> None:
        hidden.names -= set(with_zarr)  # the next one that is missing
        ps.ZarrSource("s3://bucket/store.zarr")

    def opened(name: str, *below: str) -> None:
        path = Path(name, *below)
        path.parent.mkdir(exist_ok=True)
        path.touch()
        inputs_of([name])[0].open()

    calls: dict[str, Callable[[], Any]] = {
        "zarr": lambda: opened("store.zarr", "zarr.json"),
        "nwb": lambda: opened("session.nwb"),
        "nwb-zarr": lambda: opened("folder.nwb", ".zgroup"),
        "audio": lambda: opened("sound.wav"),
        "lightning": lambda: ps.recipes.trainers.PenstockDataModule,
        "accelerate": lambda: ps.recipes.trainers.prepare_loader,
        "report": lambda: plot_item({}, Path("a.png")),
        "image": lambda: decode("png", b""),
        "remote": read_remote,
        "table": lambda: read_table(Path("a.parquet")),
    }
    said = {}
    for extra, call in calls.items():
        try:
            call()
        except Exception as error:
            said[extra] = [type(error).__name__, str(error)]
    return said


def main() -> None:
    given = json.loads(sys.stdin.readline())
    hidden = Hidden(given["hidden"])
    sys.meta_path.insert(0, hidden)  # type: ignore[arg-type]
    assert not hidden.names & set(sys.modules)
    found = {"loaded": loaded(), "commands": commands(), "refusals": refusals(hidden, given["zarr"])}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
