"""Find mitochondria and ER in electron microscopy: `python examples/segment_cells.py --help`.

Generates volumes that look a little like it: blobs with a membrane and folds in them ("mito"), thin winding tubes
("er"), and dark droplets that are neither, all under noise. They are stored as OME-NGFF images of two levels, each with
its labels. A small 3-D U-Net is trained on mirrored and rotated patches, and predicts a volume that it has never seen,
patch by patch, into new OME-NGFF images. It needs about a minute on two cores, and `pip install
'penstock[volume,report]'`.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import zarr
from torch import nn
from torch.nn import functional

from penstock.recipes import cellmap

CLASSES = ["mito", "er"]
NM = (16.0, 8.0, 8.0)  # of a voxel: sections are thicker than they are fine
UNITS = np.array(NM) / NM[-1]  # of a voxel, in those of y and x
FOLD_VOXELS = 5.0  # from one fold in a mitochondrion to the next
TURNS = {"mirror": {"axes": {"z": 0.5, "y": 0.5, "x": 0.5}}, "rotate": {"axes": {"z": [-180, 180]}}}


def blobs(shape: tuple[int, ...], count: int, radii: tuple[float, float], rng: np.random.Generator) -> Iterator[tuple]:
    """Yield ellipsoids: a box, for each voxel in it how far out it lies, 1 at the border, and how far along."""
    for _ in range(count):
        turned, _ = np.linalg.qr(rng.standard_normal((3, 3)))
        centre, length = rng.uniform(0, shape), rng.uniform(*radii)
        reach = 1.6 * length / UNITS
        low, high = np.maximum(0, centre - reach).astype(int), np.minimum(shape, centre + reach + 1).astype(int)
        box = tuple(slice(begin, end) for begin, end in zip(low, high, strict=True))
        grid = np.stack(np.meshgrid(*(np.arange(part.start, part.stop) for part in box), indexing="ij"), axis=-1)
        away = (grid - centre) * UNITS @ turned
        yield box, np.linalg.norm(away / (1.6 * length, length, 0.8 * length), axis=-1), away[..., 0]


def tubes(shape: tuple[int, ...], count: int, rng: np.random.Generator) -> np.ndarray:
    """Return, for each voxel, how far it lies from the nearest of several winding lines."""
    nearest = np.full(shape, np.inf)
    grid = np.stack(np.meshgrid(*(np.arange(size) for size in shape), indexing="ij"), axis=-1)
    for _ in range(count):
        at, heading = rng.uniform(0, shape), rng.standard_normal(3) * (0.3, 1, 1)
        for _ in range(3 * max(shape)):
            heading = heading + 0.35 * rng.standard_normal(3) * (0.5, 1, 1)
            heading /= np.linalg.norm(heading)
            at = np.mod(at + heading * (0.5, 1, 1), shape)
            low = np.maximum(0, np.floor(at - 5).astype(int))
            box = tuple(slice(begin, begin + 11) for begin in low)
            away = np.linalg.norm((grid[box] - at) * UNITS, axis=-1)
            nearest[box] = np.minimum(nearest[box], away)
    return nearest


def cell(shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return a piece of a cell as a microscope shows it, and what is what."""
    rng = np.random.default_rng(seed)
    size = np.prod(shape) / 100_000
    slow = functional.interpolate(
        torch.from_numpy(rng.standard_normal((1, 1, *(2 + side // 12 for side in shape)))), shape, mode="trilinear"
    ).numpy()[0, 0]
    image = 0.65 + 0.05 * slow
    for box, out, _ in blobs(shape, round(5 * size), (3, 5), rng):  # droplets: as dark as membranes, and neither class
        image[box][out < 1] = 0.3
    away = tubes(shape, round(3 * size) + 1, rng)
    image[away < 3.4] = 0.3
    image[away < 2.0] = 0.75
    labels = {"mito": np.zeros(shape, bool), "er": away < 3.4}
    for box, out, along in blobs(shape, round(4 * size) + 1, (8, 12), rng):
        image[box][out < 1] = (0.46 + 0.1 * np.sin(2 * np.pi * along / FOLD_VOXELS))[out < 1]
        image[box][(out > 0.85) & (out < 1)] = 0.3
        labels["mito"][box] |= out < 1
    labels["er"] &= ~labels["mito"]
    blurred = functional.avg_pool3d(torch.from_numpy(image)[None], (1, 2, 2), 1).numpy()[0]
    image[:, 1:, 1:] = blurred
    image += 0.11 * rng.standard_normal(shape)
    return np.clip(image * 255, 0, 255).astype(np.uint8), labels


def store(path: Path, data: np.ndarray) -> None:
    """Write an OME-NGFF image of two levels."""
    group = zarr.create_group(path, zarr_format=2)
    datasets = []
    for level in range(2):
        values = data[:, :: 2**level, :: 2**level]
        group.create_array(f"s{level}", data=values, chunks=(16, 32, 32))
        scale = [NM[0], *(size * 2**level for size in NM[1:])]
        datasets.append({"path": f"s{level}", "coordinateTransformations": [{"type": "scale", "scale": scale}]})
    axes = [{"name": axis, "type": "space", "unit": "nanometer"} for axis in "zyx"]
    group.attrs["multiscales"] = [{"version": "0.4", "axes": axes, "datasets": datasets}]


def generate(folder: Path, volumes: int, shape: tuple[int, ...], seed: int) -> dict[str, list[dict[str, str]]]:
    """Write volumes with their labels; return which are for training, and that the last one is not."""
    split: dict[str, list[dict[str, str]]] = {"train": [], "validate": []}
    for number in range(volumes):
        image, labels = cell(shape, seed + number)
        place = folder / f"cell{number}.zarr"
        store(place / "em", image)
        for name, where in labels.items():
            store(place / "labels" / name, where.astype(np.uint8))
        row = {"raw": str(place / "em"), "gt": f"{place}/labels/[{','.join(CLASSES)}]"}
        split["validate" if number == volumes - 1 else "train"].append(row)
    return split


def centred(raw: torch.Tensor) -> torch.Tensor:
    """Return grey values around 0."""
    return raw / 128 - 1


class UNet(nn.Module):
    """Looks at a patch in three resolutions; gives a number for each voxel and class."""

    def __init__(self, classes: int, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.layers(1, width), self.layers(width, 2 * width)])
        self.deep = self.layers(2 * width, 4 * width)
        self.up = nn.ModuleList([self.layers(6 * width, 2 * width), self.layers(3 * width, width)])
        self.last = nn.Conv3d(width, classes, 1)

    @staticmethod
    def layers(inside: int, outside: int) -> nn.Sequential:
        """Return two convolutions; the first looks at one section only, as sections are thick."""
        return nn.Sequential(
            nn.Conv3d(inside, outside, (1, 3, 3), padding=(0, 1, 1), bias=False),
            nn.BatchNorm3d(outside),
            nn.ReLU(inplace=True),
            nn.Conv3d(outside, outside, 3, padding=1, bias=False),
            nn.BatchNorm3d(outside),
            nn.ReLU(inplace=True),
        )

    def forward(self, patch: torch.Tensor) -> torch.Tensor:
        """Return logits, (patches, classes, z, y, x)."""
        seen = []
        for layers, pool in zip(self.down, ((1, 2, 2), (2, 2, 2)), strict=True):
            patch = layers(patch)
            seen.append(patch)
            patch = functional.max_pool3d(patch, pool)
        patch = self.deep(patch)
        for layers in self.up:
            finer = seen.pop()
            patch = layers(torch.cat([functional.interpolate(patch, finer.shape[2:]), finer], dim=1))
        return self.last(patch)


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return cross entropy, and what the overlap lacks; voxels that nobody has labelled do not count."""
    known = ~torch.isnan(target)
    wanted = (target > 0).float()
    entropy = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")[known].mean()
    guess = torch.sigmoid(logits) * known
    both, sizes = (guess * wanted).sum(dim=(0, 2, 3, 4)), (guess + wanted * known).sum(dim=(0, 2, 3, 4))
    return entropy + (1 - (2 * both + 1) / (sizes + 1)).mean()


def train(split: cellmap.CellMapDataSplit, batches: int, batch_size: int, seed: int) -> UNet:
    """Train on `batches` batches of random patches."""
    torch.manual_seed(seed)
    model = UNet(len(CLASSES)).to(memory_format=torch.channels_last_3d)  # half the time of the usual one, on a CPU
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=batches)
    loader = cellmap.CellMapDataLoader(
        split.train_datasets_combined, batch_size=batch_size, num_workers=1, iterations_per_epoch=batches, rng=seed
    )
    began, waited, losses = time.perf_counter(), 0.0, []
    asked = began
    for batch in loader:
        waited += time.perf_counter() - asked
        loss = loss_of(model(batch["raw"]), batch["gt"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if len(losses) % (batches // 5) == 0:
            print(f"   after {len(losses)} batches: loss {np.mean(losses[-batches // 5 :]):.3f}")
        asked = time.perf_counter()
    loader.close()
    taken = time.perf_counter() - began
    print(f"   {taken:.0f} s, of which {100 * waited / taken:.0f} % were waiting for data")
    return model.eval()


def predict(model: UNet, raw: str, out: Path, patch: dict) -> None:
    """Predict a whole volume, patch by patch."""
    with cellmap.CellMapDatasetWriter(
        raw,
        f"{out}/[{','.join(CLASSES)}]",
        CLASSES,
        {"raw": patch},
        {"probability": patch},
        raw_value_transforms=centred,
    ) as writer:
        for batch in writer.loader(batch_size=4):
            with torch.no_grad():
                writer[batch["idx"]] = {"probability": torch.sigmoid(model(batch["raw"]))}
        print(f"   {len(writer.blocks)} patches became {out}")


def voxels(path: str | Path) -> np.ndarray:
    """Return the finest level of an image."""
    return np.asarray(zarr.open_group(str(path), mode="r")["s0"][...])


def dice(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return how much two sets of voxels have in common: 0 nothing, 1 all."""
    return float(2 * (found & wanted).sum() / max(1, found.sum() + wanted.sum()))


def draw(path: Path, raw: np.ndarray, target: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> None:
    """Draw a section and a cut across all sections: raw, target and prediction side by side."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    colours = {"mito": (1.0, 0.45, 0.1), "er": (0.1, 0.8, 0.9)}
    figure, axes = plt.subplots(
        2, 3, figsize=(10.5, 5.6), layout="constrained", height_ratios=[raw.shape[1], 2 * len(raw)]
    )
    # The section, and the row, that have most of both classes in them.
    z, y = (int(np.argmax(np.sqrt(np.prod([m.mean(a) for m in target.values()], axis=0)))) for a in ((1, 2), (0, 2)))
    for row, (cut, stretch, name) in enumerate(
        (((z,), 1, f"section {z}"), ((slice(None), y), NM[0] / NM[1], f"row {y}"))
    ):
        for column, (title, shown) in enumerate((("raw", {}), ("target", target), ("prediction", found))):
            picture = np.repeat(raw[cut][..., None] / 255.0, 3, axis=-1)
            for label, values in shown.items():
                share = 0.6 * values[cut][..., None].astype(float)
                picture = picture * (1 - share) + np.array(colours[label]) * share
            axes[row, column].imshow(picture, aspect=stretch, interpolation="nearest")
            axes[row, column].set_title(f"{title}, {name}", fontsize=10)
            axes[row, column].set_axis_off()
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    figure.legend(handles, colours, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def segment(folder: Path, *, quick: bool, seed: int) -> dict[str, float]:
    """Generate, train, predict and compare; return the Dice of each class."""
    volumes, shape, batches = (3, (20, 64, 64), 40) if quick else (6, (32, 128, 128), 240)
    patch = {"shape": (8, 32, 32) if quick else (12, 48, 48), "scale": NM}
    print(f"1. {volumes} volumes of {' x '.join(map(str, shape))} voxels are written to {folder}.")
    paths = generate(folder, volumes, shape, seed)
    split = cellmap.CellMapDataSplit(
        {"raw": patch},
        {"gt": patch},
        CLASSES,
        dataset_dict=paths,
        spatial_transforms=TURNS,
        train_raw_value_transforms=centred,
        val_raw_value_transforms=centred,
    )
    print(f"2. A U-Net learns from {volumes - 1} of them, in patches that are mirrored and turned.")
    model = train(split, batches, 4, seed)
    print("3. It predicts the last one, which it has never seen.")
    (held_out,) = paths["validate"]
    predict(model, held_out["raw"], folder / "prediction.zarr", patch)
    labels, scores = Path(held_out["raw"]).parent / "labels", {}
    target = {name: voxels(labels / name) > 0 for name in CLASSES}
    found = {name: voxels(folder / "prediction.zarr" / name) for name in CLASSES}
    print("4. Voxels that are found and right, as Dice (1 is perfect); guessing would give the share of the class:")
    for name in CLASSES:
        scores[name] = dice(found[name] > 0.5, target[name])
        print(f"   {name:5} {scores[name]:.2f}, guessing {target[name].mean():.2f}")
    draw(folder / "segmented.png", voxels(held_out["raw"]), target, found)
    return scores


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Do it all; return the Dice of each class."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds: small volumes, little training, and worse")
    parser.add_argument("--keep", type=Path, help="a new folder for volumes, predictions and the picture")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    if chosen.keep is None:
        with tempfile.TemporaryDirectory() as temporary:
            scores = segment(Path(temporary), quick=chosen.quick, seed=chosen.seed)
        print("5. All files are gone again; --keep DIR keeps them, with a picture.")
        return scores
    chosen.keep.mkdir(parents=True)
    scores = segment(chosen.keep, quick=chosen.quick, seed=chosen.seed)
    print(f"5. Look at {chosen.keep / 'segmented.png'}.")
    return scores


if __name__ == "__main__":
    main()
