"""The example of segmentation finds both classes in a volume that it has not seen, and stores what it finds."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import zarr
from penstock_scripts import load_script

from penstock.source.volume.ngff import Multiscale


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    module = load_script("examples/segment_cells.py")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of torch wait for each other where tests share the cores
    yield module
    torch.set_num_threads(threads)


def test_it_learns_and_its_predictions_lie_where_the_volume_does(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kept"
    scores = example.main(["--quick", "--keep", str(out)])
    printed = capsys.readouterr().out
    raw = Multiscale.opened(out / "cell2.zarr" / "em")
    for name, least in (("mito", 0.6), ("er", 0.4)):
        group = zarr.open_group(str(out / "prediction.zarr"), mode="r")
        found = np.asarray(group[f"{name}/s0"][...])
        target = zarr.open_array(str(out / "cell2.zarr" / "labels" / name / "s0"), mode="r")[...] > 0
        assert found.min() >= 0
        assert found.max() <= 1
        right = np.count_nonzero((found > 0.5) & target)
        assert scores[name] == 2 * right / (np.count_nonzero(found > 0.5) + np.count_nonzero(target))
        assert scores[name] > least > 3 * target.mean()  # of what guessing would give
        image = Multiscale.opened(out / "prediction.zarr" / name)
        assert image.axes == raw.axes
        assert (image.levels[0].scale, image.levels[0].translation) == (raw.levels[0].scale, raw.levels[0].translation)
        assert f"{name:5} {scores[name]:.2f}, guessing {target.mean():.2f}" in printed
    picture = (out / "segmented.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 50_000


def test_it_explains_itself(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        example.main(["--help"])
    assert ended.value.code == 0
    assert "--keep" in capsys.readouterr().out
