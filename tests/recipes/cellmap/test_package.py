"""The cellmap-data package's own datasets in our loader. It needs a zarr below 3, and so an interpreter of its own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from penstock_tree import find_python

_PYTHON = find_python("cellmap")
_ROOT = Path(__file__).parents[3]

_CODE = """
    import json, sys
    from pathlib import Path

    import numpy as np
    import torch
    import zarr

    try:
        import torchvision
    except RuntimeError:
        # A torchvision that was built for CUDA beside a torch that was not: two operators have no name. None is called.
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision

    from cellmap_data import CellMapDataset, CellMapMultiDataset
    from torch.utils.data import Subset

    from penstock.recipes.cellmap import CellMapDataLoader

    folder = Path(sys.argv[1])
    SHAPE, PATCH = (10, 12, 14), {"shape": (4, 4, 4), "scale": (8.0, 8.0, 8.0)}
    NUMBERS = np.arange(1, 1 + np.prod(SHAPE)).reshape(SHAPE).astype("f4")

    def write(path, data):
        group = zarr.open_group(str(path), mode="w")
        group.create_dataset("s0", data=data, chunks=(5, 6, 7))
        scale = [{"type": "scale", "scale": [8.0] * 3}, {"type": "translation", "translation": [0.0] * 3}]
        axes = [{"name": axis, "type": "space", "unit": "nanometer"} for axis in "zyx"]
        datasets = [{"path": "s0", "coordinateTransformations": scale}]
        group.attrs["multiscales"] = [{"version": "0.4", "axes": axes, "datasets": datasets}]

    def crop(name, classes, **options):
        write(folder / name / "em", NUMBERS)
        for label in classes:
            write(folder / name / "labels" / label, (NUMBERS % 2).astype("u1"))
        path = f"{folder}/{name}/labels/[{','.join(classes)}]"
        return CellMapDataset(f"{folder}/{name}/em", path, ["mito", "er"], {"raw": PATCH}, {"gt": PATCH}, **options)

    def flat(batch):
        return tuple((name, value.numpy().tobytes()) for name, value in batch.items())

    # Every batch has the items that the dataset itself gives, and each comes once.
    plain = crop("a", ["mito"])
    assert type(plain).__module__.startswith("cellmap_data")
    loader = CellMapDataLoader(plain, batch_size=9, rng=1)
    assert loader.classes == ["mito", "er"]
    items = []
    for batch in loader:
        for row, item in enumerate(batch["idx"].tolist()):
            own = plain[item]
            assert np.array_equal(batch["raw"][row], own["raw"]) and batch["raw"].shape[1:] == (1, 4, 4, 4)
            assert np.array_equal(batch["gt"][row], own["gt"], equal_nan=True) and batch["gt"].shape[1] == 2
            items.append(item)
    assert sorted(items) == list(range(len(plain))) != items
    assert len(loader) == -(-len(plain) // 9)
    chosen = [5, 3, 17]
    part = CellMapDataLoader(Subset(plain, chosen), batch_size=2, is_train=False)
    assert [batch["idx"].tolist() for batch in part] == [[5, 3], [17]]
    # Patches are where the raw data are: each is a block of consecutive numbers.
    first = plain[0]["raw"][0].numpy()
    corner = tuple(np.argwhere(NUMBERS == first[0, 0, 0])[0])
    assert np.array_equal(first, NUMBERS[tuple(slice(begin, begin + 4) for begin in corner)])

    # Its augmentation comes from a generator that it keeps: the same for any workers, other in every epoch, resumable.
    turned = {"mirror": {"axes": {"x": 0.5, "y": 0.5, "z": 0.5}}, "transpose": True}

    def augmented(**options):
        multi = CellMapMultiDataset(
            [crop("b", ["mito"], spatial_transforms=turned), crop("c", ["mito", "er"], spatial_transforms=turned)],
            ["mito", "er"], {"raw": PATCH}, {"gt": PATCH},
        )
        return CellMapDataLoader(multi, batch_size=4, iterations_per_epoch=5, rng=3, **options)

    inline = augmented()
    epochs, state = [], None
    for epoch in range(2):
        epochs.append([])
        for batch in inline:
            epochs[-1].append(flat(batch))
            if (epoch, len(epochs[-1])) == (1, 2):
                state = json.loads(json.dumps(inline.state_dict()))
    assert set(epochs[0]).isdisjoint(epochs[1])
    for options in ({"num_workers": 1}, {"num_workers": 2, "multiprocessing_context": "fork"}):
        workers = augmented(**options)
        assert [[flat(batch) for batch in workers] for _ in range(2)] == epochs
        workers.close()
    resumed = augmented()
    resumed.load_state_dict(state)
    assert [flat(batch) for batch in resumed] == epochs[1][2:]
    sampled = CellMapDataLoader(inline.dataset, batch_size=2, sampler=[7, 7, 7, 7, 7, 7])
    same = [flat({"raw": row}) for batch in sampled for row in batch["raw"]]
    assert len(set(same)) > 1  # the same item six times, augmented differently each time

    # Weighted: er is in one crop of two, mito in both, so that the crop with both has three quarters.
    weighted = CellMapDataLoader(inline.dataset, batch_size=8, weighted_sampler=True, iterations_per_epoch=5)
    drawn = np.concatenate([weighted._pytorch_loader.plan.epoch(0).draw(n).items for n in range(5)])
    assert (drawn >= inline.dataset.cumulative_sizes[0]).sum() == 30 and len(list(weighted)) == 5
    CellMapDataLoader(plain, weighted_sampler=True)  # 'er' is nowhere and gets no share
    print("done")
"""


@pytest.mark.skipif(
    _PYTHON is None,
    reason="needs an environment with cellmap-data and a zarr below 3: make .venv-cellmap/.ready",
)
def test_cellmap_data_datasets_give_the_same_augmented_items_for_any_workers(tmp_path: Path) -> None:
    done = subprocess.run(
        [_PYTHON or sys.executable, "-W", "ignore", "-c", textwrap.dedent(_CODE), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(_ROOT / "src")},
    )
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr
