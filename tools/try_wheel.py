"""Uses an installed wheel: writes shards, reads them with worker processes, and asks the machine for the C part.

Run by `make wheels` and by cibuildwheel, in an environment with the wheel alone.
"""

import json
import os
import subprocess
import sys
import tempfile

import numpy as np

import penstock as ps


def main() -> None:
    """Work in a folder without the source."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        data = {"x": np.arange(40, dtype=np.float32).reshape(20, 2), "label": np.arange(20)}
        ps.create_shards_from_arrays("shards", data, shard_size=6)
        for workers in (0, 2):
            with ps.create_webdataset_dataloader("shards", batch_size=5, num_workers=workers, shuffle=False) as loader:
                batches = list(loader)
            for name, array in data.items():
                assert np.concatenate([batch[name] for batch in batches]).tolist() == array.tolist(), (workers, name)
        inspect = [sys.executable, "-m", "penstock", "inspect", "--json"]
        said = json.loads(subprocess.run(inspect, capture_output=True, text=True, check=False).stdout)
        (native,) = [each for each in said["findings"] if each["name"] == "installation.native"]
        assert native["level"] == "ok", native
        print(ps.__file__, native["text"], sep="\n")
        os.chdir("/")


if __name__ == "__main__":
    main()
