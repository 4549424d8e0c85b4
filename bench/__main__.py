"""`python -m bench [NAME ...] [--repeats N]`: all benchmarks, or the named ones; `cold` and `remote` have parts."""

import argparse
import tempfile
from pathlib import Path

from bench import (
    chunked,
    chunks,
    cold,
    convert,
    delivery,
    imports,
    lengths,
    many_shards,
    mixtures,
    order,
    remote,
    shards,
    streams,
    tables,
    tuning,
    volumes,
)

BENCHMARKS = {
    "imports": imports.run,
    "order": order.run,
    "lengths": lengths.run,
    "delivery": delivery.run,
    "shards": shards.run,
    "many_shards": many_shards.run,
    "mixtures": mixtures.run,
    "convert": convert.run,
    "chunks": chunks.run,
    "streams": streams.run,
    "chunked": chunked.run,
    "tables": tables.run,
    "tuning": tuning.run,
    "volumes": volumes.run,
    **cold.PARTS,
    **remote.PARTS,
}
GROUPS = {"cold": list(cold.PARTS), "remote": list(remote.PARTS)}


def main() -> None:
    """Run the benchmarks that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join([*BENCHMARKS, *GROUPS])}; all by default"
    )
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats (default 3)")
    parser.add_argument("--data", type=Path, help="keep generated data here (default: a temporary folder)")
    chosen = parser.parse_args()
    names = [name for given in chosen.names or BENCHMARKS for name in GROUPS.get(given, [given])]
    unknown = set(names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; use {', '.join([*BENCHMARKS, *GROUPS])}")
    out = Path(__file__).parent / "out" / "results.json"
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            print(f"# {name}", flush=True)
            BENCHMARKS[name](chosen.data or Path(folder), out, chosen.repeats)
    print(f"Saved to {out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out}.")


if __name__ == "__main__":
    main()
