"""One multiscale image, read around any point in world coordinates."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack

import numpy as np
import torch

from penstock.core.cached import cached_property
from penstock.core.checks import check_keys, option_names
from penstock.core.errors import OptionError
from penstock.core.seeds import generator_for
from penstock.recipes.cellmap.dataset import ImageOptions, check_context, count_voxels
from penstock.recipes.cellmap.transforms import ValueTransform
from penstock.source.stored.zarr.record import MissingChunks
from penstock.source.volume.source import VolumeArray, VolumeSource

__all__ = ["CellMapImage", "EmptyImage"]


class CellMapImage:
    """An OME-NGFF image at one scale: `image[{"z": 10.0, "y": 20.0, "x": 5.0}]` is the patch around that point.

    Parameters
    ----------
    path
        Path or URL of the image.
    target_class
        What the image shows: `"raw"` or a class name.
    target_scale, target_voxel_shape
        World units per voxel, and shape of a patch in voxels, in `axis_order`.
    pad, pad_value
        Whether patches may reach over the border, and the value of voxels outside.
    interpolation
        `"linear"` for raw data, `"nearest"` for labels.
    axis_order
        Axis order of shapes, scales and patches.
    value_transform
        Called with the tensor of a patch, or with it and a generator that is the same each time the patch is read.
    context
        Must be None; it configures TensorStore, which is not used here.
    device
        Device of the returned patches.
    at
        Index on each axis that is not spatial, such as `{"c": 0, "t": 5}`; for channels also a list, and all of them if
        not given. They are the first axis of a patch.
    missing_chunks
        What a chunk that is not stored is: None, `"error"` or `"fill"`, as in `CellMapDataset`.
    store, cache, cache_bytes
        How data at a URL are read, and where what was downloaded is kept; as in `ZarrSource`.
    """

    def __init__(
        self,
        path: str,
        target_class: str,
        target_scale: Sequence[float],
        target_voxel_shape: Sequence[int],
        pad: bool = False,
        pad_value: float = math.nan,
        interpolation: Literal["nearest", "linear"] = "nearest",
        axis_order: str = "zyx",
        value_transform: Callable[..., Any] | None = None,
        context: None = None,
        device: str | torch.device | None = None,
        **options: Unpack[ImageOptions],
    ) -> None:
        check_keys("Options", options, [*ImageOptions.__annotations__, *option_names(CellMapImage)])
        check_context(context)
        self.path, self.label_class, self.axis_order = path, target_class, axis_order
        self.scale, self.output_shape = tuple(map(float, target_scale)), tuple(map(int, target_voxel_shape))
        self.pad, self.pad_value, self.interpolation, self.device = pad, pad_value, interpolation, device
        self._transform = None if value_transform is None else ValueTransform(value_transform, "value_transform")
        self._missing_chunks: MissingChunks = options.get("missing_chunks")
        array = VolumeArray(path, self.output_shape, self.scale, interpolation, pad_value=pad_value)
        self._source = VolumeSource({"image": array}, axis_order=axis_order, pad=pad, **options)

    @property
    def bounding_box(self) -> dict[str, tuple[float, float]]:
        """Extent of the image by axis, in world units."""
        return self._source.bounding_box

    @property
    def sampling_box(self) -> dict[str, tuple[float, float]]:
        """Where centers of patches may lie, by axis, in world units."""
        return self._source.sampling_box

    @cached_property
    def class_counts(self) -> int:
        """Number of voxels above 0, in all channels, at the level that is read. Reads them once; writes nothing."""
        scale = dict(zip(self.axis_order[-len(self.scale) :], self.scale, strict=True))
        channels = (channel for channel in self._source.images["image"] if channel is not None)
        return sum(count_voxels(channel, scale, self._missing_chunks)[0] for channel in channels)

    def __getitem__(self, center: Mapping[str, float]) -> torch.Tensor:
        axes = self.axis_order[-3:]
        if not isinstance(center, Mapping) or set(center) != set(axes):
            raise OptionError(f"center must be a dict with the keys {', '.join(axes)}, got {center!r}.")
        items = self._source.item_at(np.array([[center[axis] for axis in axes]], np.float64))
        patch = np.array(self._source.take(items)["image"][0])
        values = patch if self._transform is None else self._transform(patch, generator_for(0, "image", int(items[0])))
        return torch.from_numpy(values).to(self.device or "cpu")

    def to(self, device: str | torch.device) -> "CellMapImage":
        """Return this image; its patches are put on `device` from now on."""
        self.device = device
        return self

    def __repr__(self) -> str:
        return f"CellMapImage({self.path}, {self.label_class!r}, {self.output_shape} at {self.scale})"


class EmptyImage:
    """A class without labels: all its patches are unknown.

    Parameters
    ----------
    target_class
        Name of the class.
    scale, voxel_shape
        World units per voxel, and shape of a patch in voxels.
    empty_value
        Value of all voxels; NaN means unknown.

    Examples
    --------
    >>> EmptyImage("mito", (8, 8, 8), (1, 2, 2))[{"z": 0.0, "y": 0.0, "x": 0.0}].shape
    torch.Size([1, 1, 2, 2])
    """

    bounding_box: None = None
    sampling_box: None = None
    class_counts = 0

    def __init__(
        self,
        target_class: str,
        scale: Sequence[float],
        voxel_shape: Sequence[int],
        empty_value: float = math.nan,
    ) -> None:
        self.label_class, self.scale, self.output_shape = target_class, tuple(scale), tuple(voxel_shape)
        self.empty_value = empty_value
        self.device: str | torch.device | None = None

    def __getitem__(self, center: Mapping[str, float]) -> torch.Tensor:
        if not isinstance(center, Mapping):
            raise OptionError(f"center must be a dict of coordinates by axis, got {center!r}.")
        return torch.full((1, *self.output_shape), self.empty_value, device=self.device)

    def to(self, device: str | torch.device) -> "EmptyImage":
        """Return this image; its patches are put on `device` from now on."""
        self.device = device
        return self
