"""Start-up of a training: the import, opening a dataset, and its first batch, each in a fresh interpreter.

The dataset is that of `shards`, 295 kB items, in the page cache; compiled files of all modules are there. How start-up
grows with the number of shards is in `many_shards`.
"""

import subprocess
import sys
from pathlib import Path

from bench.measure import Contender, measured_ms, report
from bench.shard_data import warm
from bench.shards import write_shards

__all__ = ["run"]

_CODE = """
import sys, time
began = time.perf_counter()
{code}
print(1000 * (time.perf_counter() - began))
"""
_OPEN = "import penstock as ps\nsource = ps.TarSource(sys.argv[1])"
_ITERATE = (
    "plan = ps.Plan(source.index, ps.Shuffle(), batch_size=32)\n"
    "with ps.Loader(source, plan, num_workers={workers}{options}) as loader:\n"
    "    for batch in loader:\n"
    "        break"
)
_PROCESSES = ", options=ps.RunOptions(executor='processes')"
STAGES = {
    "import penstock": "import penstock",
    "import penstock, open the shards": _OPEN,
    "import torch": "import torch",
    "import torch and penstock, open, first batch": f"import torch\n{_OPEN}\n" + _ITERATE.format(workers=0, options=""),
    "the same with 2 threads": f"import torch\n{_OPEN}\n"
    + _ITERATE.format(workers=2, options=", options=ps.RunOptions(executor='threads')"),
    "the same with 2 processes": f"import torch\n{_OPEN}\n" + _ITERATE.format(workers=2, options=_PROCESSES),
}


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    shards = write_shards(folder, "large")
    warm(shards)
    for code in STAGES.values():  # compiles what is not
        stage_ms(code, shards)
    report(
        out,
        "startup",
        measured_ms([Contender(name, stage_ms, (code, shards)) for name, code in STAGES.items()], repeats),
    )


def stage_ms(code: str, shards: Path) -> float:
    """Return the milliseconds that some lines take in a fresh interpreter, without its own start."""
    command = [sys.executable, "-c", _CODE.format(code=code), str(shards)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
