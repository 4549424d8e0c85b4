"""Writes samples into WebDataset-compatible tar shards."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.core.checks import check_keys, option_names
from penstock.core.errors import OptionError
from penstock.files.progress import track_progress
from penstock.files.stores.options import StoreOptions
from penstock.shard.codec import ArrayFormat
from penstock.shard.compression import Compression
from penstock.shard.outputs.write_options import Layout, WriteOptions
from penstock.shard.writer import ShardWriter

__all__ = ["WebDatasetWriter", "create_shards_from_arrays"]

_ROWS_AT_ONCE = 1 << 14  # between two updates of the progress

_Path = str | os.PathLike[str]


class WebDatasetWriter:
    """Writes samples into tar shards with checksums, and a manifest once all shards are complete.

    Parameters
    ----------
    output_dir
        The folder of the dataset, or a URL such as `s3://bucket/train`. To a URL, shards are uploaded while the next
        samples are written.
    shard_size
        Samples per shard.
    shard_name_pattern
        File names of shards.
    compression
        Compression of whole shards. `"none"` allows random access; other shards are decompressed whole.
    array_format
        `"npy"`, or `"pyd"` for pickled arrays, as older readers require.
    max_shard_bytes
        Maximum size of a shard.
    metadata
        Metadata of the whole dataset, kept in the manifest.
    resume
        Continue after the shards that a killed writer completed: they hold the first `written` samples. Write the
        samples from number `written` on; or, without asking for `written`, all of them from the beginning: those that
        are stored are compared and skipped. OptionError if the samples are others.
    overwrite
        Replace an existing dataset at the moment when the new one is complete; False: raise WriteError.
    store
        How the URL is reached (endpoint, credentials); None: from the environment.
    layout
        `"samples"`: each sample has its own members, as the webdataset library reads them. `"columns"`: one `.npy` for
        each field and block of samples, which is several times smaller and faster for samples of some kilobytes.
        `"auto"`: columns, for shards whose first sample has less than 64 KiB.

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
        overwrite: bool = False,
        store: StoreOptions | None = None,
        layout: Layout = "samples",
    ) -> None:
        options = WriteOptions(
            shard_size, shard_name_pattern, compression, array_format, max_shard_bytes, dict(metadata or {}), layout
        )
        self._writer = ShardWriter(output_dir, options, resume=resume, overwrite=overwrite, store=store)

    @property
    def written(self) -> int:
        """Samples written so far; after `resume=True`, the number of the next sample to write.

        Whoever asks for it before the first sample is expected to continue there.
        """
        return self._writer.written

    def write_sample(
        self, sample: Mapping[str, Any], sample_id: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Add one sample: a dict of arrays, tensors, numbers, strings, bytes, lists and dicts."""
        self._writer.write(sample, sample_id, metadata)

    def write_rows(
        self,
        arrays: Mapping[str, Any],
        start: int,
        stop: int,
        metadata: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Add rows `start` to `stop` of arrays as samples; `metadata` is one mapping per row.

        Into `layout="columns"`, rows without metadata are written in blocks, which takes no time per sample.
        """
        if metadata is None:
            self._writer.write_rows(arrays, start, stop)
            return
        for number, about in zip(range(start, stop), metadata, strict=True):
            self._writer.write({name: array[number] for name, array in arrays.items()}, None, about)

    def write_batch(
        self,
        samples: Iterable[Mapping[str, Any]],
        sample_ids: Sequence[str] | None = None,
        metadata: Sequence[Mapping[str, Any]] | Mapping[str, Any] | None = None,
        show_progress: bool = True,
    ) -> None:
        """Add several samples; `metadata` is one mapping per sample, or a single mapping for all of them."""
        samples = samples if isinstance(samples, Sequence) else list(samples)
        each: Sequence[Mapping[str, Any] | None]
        each = [metadata] * len(samples) if metadata is None or isinstance(metadata, Mapping) else metadata
        ids: Sequence[str | None] = [None] * len(samples) if sample_ids is None else sample_ids
        if not len(samples) == len(ids) == len(each):
            raise OptionError(
                f"samples, sample_ids and metadata must have the same length, got {len(samples)}, {len(ids)} and "
                f"{len(each)}."
            )
        with track_progress("Writing", len(samples), "samples", show=show_progress) as progress:
            for sample, sample_id, about in zip(samples, ids, each, strict=True):
                self._writer.write(sample, sample_id, about)
                progress.advance()

    def finalize(self) -> dict[str, Any]:
        """Publish the dataset and return the summary of its manifest; idempotent."""
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
    overwrite: bool = False,
    show_progress: bool = True,
    **writer_options: Any,
) -> dict[str, Any]:
    """Write the rows of arrays as samples, and return the summary of the manifest.

    Parameters
    ----------
    output_dir
        The folder of the dataset, or a URL such as `s3://bucket/train`.
    data_dict
        Arrays by name, all of the same length; memory maps are read row by row.
    shard_size
        Samples per shard.
    metadata
        A mapping: metadata of the whole dataset, kept once. A list: one mapping per sample.
    resume
        Continue where a killed call stopped.
    overwrite
        Replace an existing dataset; False: raise WriteError.
    show_progress
        Show progress on stderr.
    writer_options
        Other arguments of `WebDatasetWriter`: `compression`, `array_format`, `max_shard_bytes`, `shard_name_pattern`,
        `store`, `layout`.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> summary = create_shards_from_arrays(tempfile.mkdtemp(), {"x": np.arange(5), "y": np.ones((5, 3))}, shard_size=2)
    >>> summary["total_samples"], summary["modalities"]
    (5, ['x', 'y'])
    """
    check_keys("Options", writer_options, option_names(WebDatasetWriter, create_shards_from_arrays))
    n_samples = _check_lengths(data_dict)
    each = None if metadata is None or isinstance(metadata, Mapping) else metadata
    if each is not None and len(each) != n_samples:
        raise OptionError(f"metadata must be one mapping, or a list of {n_samples}, one per sample, got {len(each)}.")
    whole = metadata if isinstance(metadata, Mapping) else None
    options = {"shard_size": shard_size, "metadata": whole, "resume": resume, "overwrite": overwrite, **writer_options}
    with WebDatasetWriter(output_dir, **options) as writer:
        with track_progress("Writing", n_samples, "samples", show=show_progress) as progress:
            progress.advance(writer.written)
            for start in range(writer.written, n_samples, _ROWS_AT_ONCE):
                stop = min(start + _ROWS_AT_ONCE, n_samples)
                writer.write_rows(data_dict, start, stop, None if each is None else each[start:stop])
                progress.advance(stop - start)
    return writer.finalize()


def _check_lengths(arrays: Mapping[str, Any]) -> int:
    """Return the number of rows, which must be the same in all arrays."""
    if not isinstance(arrays, Mapping) or not arrays:
        raise OptionError(f"data_dict must map names to arrays, such as {{'spikes': array}}, got {arrays!r}.")
    for name, array in arrays.items():
        if not hasattr(array, "__len__") or not hasattr(array, "__getitem__") or getattr(array, "ndim", 1) == 0:
            raise OptionError(f"{name!r} must be an array with one row per sample, got {type(array).__name__}.")
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise OptionError(f"All arrays must have same first dimension, got {lengths}.")
    return next(iter(lengths.values()))
