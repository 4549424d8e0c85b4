"""Convert recordings with workers from Slurm or LSF: `python examples/convert_slurm.py --help`.

It needs `pip install 'penstock[nwb,dask]' dask-jobqueue` (for --queue local, dask-jobqueue is not needed). All machines
must see the inputs and the output under the same path.
"""

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

import penstock as ps
from penstock.convert import ConvertOptions
from penstock.shard import WriteOptions


@contextmanager
def workers(chosen: argparse.Namespace) -> Iterator[Executor]:
    """Yield an executor whose workers are jobs of the queue."""
    from distributed import Client

    job: dict[str, Any] = {"cores": 1, "processes": 1, "memory": chosen.memory, "walltime": chosen.walltime}
    if chosen.queue == "slurm":
        from dask_jobqueue import SLURMCluster

        cluster = SLURMCluster(**job, queue=chosen.partition)
    elif chosen.queue == "lsf":
        from dask_jobqueue import LSFCluster

        cluster = LSFCluster(**job, queue=chosen.partition)
    else:
        from distributed import LocalCluster

        cluster = LocalCluster(
            n_workers=chosen.jobs,
            threads_per_worker=1,
            dashboard_address=None,
            scheduler_kwargs={"dashboard_address": ":0"},  # any port
        )
    with cluster, Client(cluster) as client:
        cluster.scale(chosen.jobs)
        yield client.get_executor(pure=False)


def main() -> None:
    """Convert."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", nargs="+", help="files or patterns")
    parser.add_argument("--output", required=True, help="the folder of the dataset, on a shared file system")
    parser.add_argument("--jobs", type=int, default=2, help="workers (default 2)")
    parser.add_argument("--queue", choices=("slurm", "lsf", "local"), default="slurm")
    parser.add_argument("--partition", help="the partition or queue to ask")
    parser.add_argument("--memory", default="4GB", help="per worker (default 4GB)")
    parser.add_argument("--walltime", default="04:00:00", help="per worker (default 04:00:00)")
    parser.add_argument("--shard-size", type=int, default=1000)
    parser.add_argument("--resume", action="store_true", help="continue an interrupted conversion")
    chosen = parser.parse_args()
    try:
        with workers(chosen) as executor:
            summary = ps.convert_to_shards(
                chosen.inputs,
                chosen.output,
                options=ConvertOptions(WriteOptions(shard_size=chosen.shard_size)),
                workers=chosen.jobs,
                executor=executor,
                resume=chosen.resume,
            )
    except ps.PenstockError as error:
        sys.exit(f"Error: {error}")
    print(f"{summary['total_samples']:,} samples in {summary['total_shards']:,} shards in {chosen.output}")


if __name__ == "__main__":
    main()
