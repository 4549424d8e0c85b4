"""Seed 004, the writing half: samples into tar shards, under the names of its document."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.core.errors import OptionError
from penstock.observe.progress import track_progress
from penstock.shard.codec import ArrayFormat
from penstock.shard.compression import Compression
from penstock.shard.writer import ShardWriter, WriteOptions

__all__ = ["WebDatasetWriter", "create_shards_from_arrays"]

_Path = str | os.PathLike[str]


class WebDatasetWriter:
    """Writes samples into tar shards, with checksums, and a manifest that appears when all of them are there.

    Parameters
    ----------
    output_dir
        The folder of the data set. One that is there already is replaced when the new one is finished.
    shard_size
        Samples per shard.
    shard_name_pattern
        File names of shards.
    compression
        Of whole shards. `"none"` reads like an array; the others must be decompressed shard by shard.
    array_format
        `"npy"`, or `"pyd"` for pickled arrays as older readers want them.
    max_shard_bytes
        Begin another shard rather than exceed this.
    metadata
        What is known of the whole data set; kept in the manifest.
    resume
        Go on after the shards that a killed writer finished: they hold the samples up to `written`, the next to write.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> with WebDatasetWriter(tempfile.mkdtemp(), shard_size=2) as writer:
    ...     for trial in range(3):
    ...         writer.write_sample({"spikes": np.full((4, 2), trial)}, metadata={"trial_id": trial})
    >>> writer.finalize()["total_shards"]
    2
    """

    def __init__(
        self,
        output_dir: _Path,
        shard_size: int = 1000,
        shard_name_pattern: str = "shard_{shard_idx:06d}.tar",
        compression: Compression = "none",
        array_format: ArrayFormat = "npy",
        max_shard_bytes: int | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> None:
        options = WriteOptions(
            shard_size, shard_name_pattern, compression, array_format, max_shard_bytes, dict(metadata or {})
        )
        self._writer = ShardWriter(output_dir, options, resume=resume)

    @property
    def written(self) -> int:
        """Samples in the data set so far; after `resume=True`, the number of the sample to go on with."""
        return self._writer.written

    def write_sample(
        self, sample: Mapping[str, Any], sample_id: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Add one sample: a dict of arrays, tensors, numbers, strings, bytes, lists and dicts."""
        self._writer.write(sample, sample_id, metadata)

    def write_batch(
        self,
        samples: Iterable[Mapping[str, Any]],
        sample_ids: Sequence[str] | None = None,
        metadata: Sequence[Mapping[str, Any]] | Mapping[str, Any] | None = None,
        show_progress: bool = True,
    ) -> None:
        """Add several samples, each with an id and metadata of its own; one mapping of metadata is for all of them."""
        samples = samples if isinstance(samples, Sequence) else list(samples)
        each: Sequence[Mapping[str, Any] | None]
        each = [metadata] * len(samples) if metadata is None or isinstance(metadata, Mapping) else metadata
        ids: Sequence[str | None] = [None] * len(samples) if sample_ids is None else sample_ids
        if not len(samples) == len(ids) == len(each):
            raise OptionError(
                f"write_batch() got {len(samples)} samples, {len(ids)} sample_ids and {len(each)} metadata; "
                "give as many of each."
            )
        with track_progress("Writing", len(samples), "samples", show=show_progress) as told:
            for sample, sample_id, about in zip(samples, ids, each, strict=True):
                self._writer.write(sample, sample_id, about)
                told.advance()

    def finalize(self) -> dict[str, Any]:
        """Make the data set appear, and return what its manifest says. Twice is fine."""
        return self._writer.commit().summary()

    def __enter__(self) -> "WebDatasetWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._writer.commit()
        finally:
            self._writer.abandon()


def create_shards_from_arrays(
    output_dir: _Path,
    data_dict: Mapping[str, Any],
    shard_size: int = 1000,
    metadata: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    *,
    resume: bool = False,
    show_progress: bool = True,
    **writer_options: Any,
) -> dict[str, Any]:
    """Write the rows of arrays as samples, and return what the manifest says.

    Parameters
    ----------
    output_dir
        The folder of the data set.
    data_dict
        Arrays by name, all of the same length; memory maps are read row by row.
    shard_size
        Samples per shard.
    metadata
        A mapping: what is known of the whole data set, kept once. A list: one mapping for each sample.
    resume
        Go on where a killed call stopped.
    show_progress
        Tell how far it is, on standard error.
    writer_options
        Of `WebDatasetWriter`: `compression`, `array_format`, `max_shard_bytes`, `shard_name_pattern`.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> summary = create_shards_from_arrays(tempfile.mkdtemp(), {"x": np.arange(5), "y": np.ones((5, 3))}, shard_size=2)
    >>> summary["total_samples"], summary["modalities"]
    (5, ['x', 'y'])
    """
    n_samples = _length(data_dict)
    each = None if metadata is None or isinstance(metadata, Mapping) else metadata
    if each is not None and len(each) != n_samples:
        raise OptionError(f"metadata has {len(each)} entries for {n_samples} samples; give one each, or one mapping.")
    whole = metadata if isinstance(metadata, Mapping) else None
    options = {"shard_size": shard_size, "metadata": whole, "resume": resume, **writer_options}
    with WebDatasetWriter(output_dir, **options) as writer:
        with track_progress("Writing", n_samples, "samples", show=show_progress) as told:
            told.advance(writer.written)
            for number in range(writer.written, n_samples):
                sample = {name: array[number] for name, array in data_dict.items()}
                writer.write_sample(sample, metadata=None if each is None else each[number])
                told.advance()
    return writer.finalize()


def _length(arrays: Mapping[str, Any]) -> int:
    """Return how many rows all arrays have."""
    if not isinstance(arrays, Mapping) or not arrays:
        raise OptionError(f"data_dict={arrays!r}; give arrays by name, such as {{'spikes': array}}.")
    for name, array in arrays.items():
        if not hasattr(array, "__len__") or not hasattr(array, "__getitem__") or getattr(array, "ndim", 1) == 0:
            raise OptionError(f"{name!r} is a {type(array).__name__} without rows; give one row per sample.")
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise OptionError(f"All arrays must have same first dimension, got {lengths}.")
    return next(iter(lengths.values()))
