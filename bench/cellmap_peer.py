"""The dataset of the cellmap-data package under torch's DataLoader; runs in the environment of that package."""

import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["cellmap_rate"]


def cellmap_rate(path: Path, workers: int, patch: int, batch: int, batches: tuple[int, int]) -> float:
    """Draw patches at random, raw and labels; return patches per second without the first batches.

    Its own loader first draws a permutation of all places, of which there are 90 million: some are chosen here.
    """
    import torch

    untimed, timed = batches
    dataset: Any = _dataset_class()(
        raw_path=f"{path}/em",
        target_path=f"{path}/labels/[one,two]",
        classes=["one", "two"],
        input_arrays={"raw": {"shape": (patch,) * 3, "scale": (8, 8, 8)}},
        target_arrays={"gt": {"shape": (patch,) * 3, "scale": (8, 8, 8)}},
    )
    generator = torch.Generator().manual_seed(1)
    places = torch.randint(len(dataset), (batch * (timed + untimed),), generator=generator).tolist()
    chosen = torch.utils.data.Subset(dataset, places)
    loader = torch.utils.data.DataLoader(chosen, batch_size=batch, num_workers=workers, persistent_workers=workers > 0)
    count, began = 0, 0.0
    for number, found in enumerate(loader):
        if number == untimed:
            began = time.perf_counter()
        elif number > untimed:
            count += found["raw"].shape[0]
    return count / (time.perf_counter() - began)


def _dataset_class() -> Any:
    """Import the package, also beside a torchvision that was built for CUDA and a torch that was not."""
    import torch

    try:
        import torchvision  # noqa: F401  # whether it can be imported
    except RuntimeError:  # two operators have no name. None is called.
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from cellmap_data import CellMapDataset

    return CellMapDataset
