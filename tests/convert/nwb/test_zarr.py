"""NWB in zarr folders. hdmf-zarr needs a zarr below 3, so this runs in an interpreter of its own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from penstock_tree import find_python

_PYTHON = find_python("nwb-zarr")
_ROOT = Path(__file__).parents[3]

_CODE = """
    import sys
    from pathlib import Path
    import numpy as np
    from hdmf_zarr import NWBZarrIO
    from penstock_nwb_parts import *
    from penstock.core.errors import SourceError

    folder = Path(sys.argv[1])

    def recording():
        nwb = new_file()
        add_units(nwb, [[0.1, 0.1, 1.55], [], [0.0, 1.99]], quality=["good", "good", "bad"])
        add_lfp(nwb, np.arange(600).reshape(300, 2).astype("i2"), rate=100.0, conversion=0.5, offset=1.0)
        stamps = np.concatenate([np.arange(20) * 0.05, 2 + np.arange(20) * 0.05])
        add_behavior(nwb, series("speed", np.arange(40.0), timestamps=stamps))
        nwb.add_trial(start_time=0.2, stop_time=0.9)
        return nwb

    with NWBZarrIO(str(folder / "a.nwb.zarr"), mode="w") as io:
        io.write(recording())
    save_nwb(recording(), folder / "a.nwb")
    found = one_by_one(folder / "a.nwb.zarr", overlap=0, unit_filter={"quality": "good"})
    assert len(found) == 3
    fields, said = found[1]
    assert np.array_equal(fields["lfp"], np.arange(600).reshape(300, 2)[100:200] * 0.5 + 1.0)
    assert np.flatnonzero(fields["spikes"][:, 0]).tolist() == [55]
    assert fields["spikes"].shape == (100, 2)
    assert not fields["behavior_valid"].any()
    assert found[0][1]["trial_id"] == 0 and said["trial_id"] is None
    for (left, left_said), (right, right_said) in zip(
        found, one_by_one(folder / "a.nwb", overlap=0, unit_filter={"quality": "good"}), strict=True
    ):
        assert left_said | {"file": ""} == right_said | {"file": ""}
        assert all(np.array_equal(left[name], right[name], equal_nan=True) for name in left)
    (folder / "empty").mkdir()
    try:
        open_nwb(folder / "empty")
    except SourceError as error:
        assert "empty" in str(error)
    else:
        raise AssertionError("an empty folder was opened")
    print("done")
"""


@pytest.mark.skipif(
    _PYTHON is None, reason="needs an environment with hdmf-zarr and a zarr below 3: make .venv-nwb-zarr/.ready"
)
def test_a_zarr_folder_gives_what_the_hdf5_file_gives(tmp_path):
    paths = os.pathsep.join([str(_ROOT / "src"), str(_ROOT / "tests" / "parts")])
    done = subprocess.run(
        [_PYTHON or sys.executable, "-W", "ignore", "-c", textwrap.dedent(_CODE), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.stdout == "done\n", done.stderr
