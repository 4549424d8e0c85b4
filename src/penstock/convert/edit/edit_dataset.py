"""Write an edited dataset: a conversion whose inputs are shards, and whose items are chosen by edits."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.convert.convert import Existing, convert, existing_from_flags
from penstock.convert.edit.arrange import Arranged
from penstock.convert.edit.derive import hash_function
from penstock.convert.edit.edits import Edits
from penstock.convert.edit.input import EditedShards
from penstock.convert.engines import LocalEngine
from penstock.convert.inputs.protocol import input_place
from penstock.convert.scan import ConvertOptions, ProgressCallback
from penstock.convert.splits import WHOLE, Split
from penstock.convert.to_shards import choose_store, list_notes, log_notes, summaries
from penstock.core.errors import ConversionError, OptionError, ReadError, SourceError
from penstock.core.text import name_once
from penstock.files.spans.options import RemoteOptions
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url, parse_place
from penstock.observe.progress import track_phases
from penstock.shard.compression import COMPRESSIONS
from penstock.shard.manifest import METADATA, Manifest
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.places.open_dataset import open_dataset
from penstock.shard.tar import TAR_BLOCK, padded_size

__all__ = ["edit_dataset", "write_edited"]

_Place = str | os.PathLike[str] | Url

_SET_BY_CONVERSION = ("conversion", "identity")


def edit_dataset(
    source: _Place | Sequence[_Place],
    output: _Place,
    edits: Edits | None = None,
    *,
    workers: int = 1,
    resume: bool = False,
    overwrite: bool = False,
    show_progress: bool = True,
    store: StoreOptions | None = None,
) -> dict[str, Any]:
    """Write the shards of a dataset again, edited, and return the summary of the manifest; with a split, one per name.

    The dataset that is read does not change. The one that is written appears when it is complete; its manifest says
    what it was made of. The bytes are the same for any number of workers, interrupted and resumed or not.

    Parameters
    ----------
    source
        The folder or URL of a dataset; or several, which are merged in this order.
    output
        The folder or URL of the edited dataset; with a split, the one that holds one dataset per name.
    edits
        What is changed; None: datasets are merged, or copied.
    workers
        Number of processes that write shards.
    resume, overwrite
        Resume an interrupted edit of the same datasets with the same edits; replace the dataset at the output.
    show_progress
        Show progress on standard error.
    store
        How URLs are reached; None: by the environment.

    Examples
    --------
    >>> import tempfile
    >>> from penstock.convert.to_shards import convert_to_shards
    >>> folder = Path(tempfile.mkdtemp())
    >>> np.save(folder / "rows.npy", np.arange(12).reshape(6, 2))
    >>> _ = convert_to_shards(folder / "rows.npy", folder / "shards", show_progress=False)
    >>> edits = Edits(where="row >= 2", rename={"data": "x"})
    >>> found = edit_dataset(folder / "shards", folder / "edited", edits, show_progress=False)
    >>> found["total_samples"], found["modalities"]
    (4, ['x'])
    """
    sources = [source] if isinstance(source, str | os.PathLike | Url) else list(source)
    existing = existing_from_flags(resume=resume, overwrite=overwrite)
    with track_phases(show=show_progress) as bar:
        how: dict[str, Any] = {"existing": existing, "on_progress": bar, "store": store}
        manifests = write_edited(sources, parse_place(output), edits or Edits(), engine=LocalEngine(workers), **how)
    log_notes(list_notes(manifests), parse_place(output))
    return summaries(manifests)


def write_edited(
    sources: Sequence[_Place],
    output: Path | Url,
    edits: Edits,
    *,
    engine: LocalEngine,
    existing: Existing = "refuse",
    on_progress: ProgressCallback | None = None,
    store: StoreOptions | None = None,
) -> dict[str, Manifest]:
    """Write an edited dataset and return the manifest of each part."""
    if not sources:
        raise SourceError("An edit needs at least one dataset, got none.")
    if edits.is_sidecar and len(sources) > 1:
        raise OptionError(
            f"A sidecar is that of one dataset, got {len(sources)}. Add the field to each, or use copy=True."
        )
    output_store = choose_store(store, sources, output)
    places = [input_place(place) for place in sources]
    _check_places(places, output, tuple(edits.split or [WHOLE]))
    manifests = [_read_manifest(place, store) for place in places]
    edits.check_fields([list(manifest.fields) for manifest in manifests])
    added = tuple((name, str(function)) for name, function in (edits.add_fields or {}).items())
    inputs = [
        EditedShards(
            place,
            () if edits.is_sidecar else tuple(edits.list_kept(manifest.fields).items()),
            METADATA in manifest.fields,
            added,
            tuple(hash_function(function) for _, function in added),
            RemoteOptions(store) if isinstance(place, Url) else None,
        )
        for place, manifest in zip(places, manifests, strict=True)
    ]
    kept: Any = {"compression": _keep_compression(manifests), "layout": _keep_layout(manifests)}
    write = WriteOptions(_choose_shard_size(manifests, edits), metadata=_keep_own(manifests), **kept)
    split = Split() if edits.split is None else Split(tuple(edits.split.items()))
    options = ConvertOptions(write, split)
    how: dict[str, Any] = {"engine": engine, "existing": existing, "on_progress": on_progress, "store": output_store}
    try:
        return convert(inputs, output, options, arrangement=Arranged(edits, _keep_classes(manifests)), **how)
    except ConversionError as error:
        reasons = "\n".join(name_once(path, reason) for path, reason in error.reasons.items())
        raise ReadError(f"{reasons}\nNothing was published.") from error


def _check_places(sources: Sequence[Path | Url], output: Path | Url, names: Sequence[str]) -> None:
    """Raise OptionError if a dataset is given twice, or would be written into itself."""
    resolved = [_resolve(place) for place in sources]
    for place, given in zip(resolved, sources, strict=True):
        if resolved.count(place) > 1:
            raise OptionError(f"Every dataset must be given once, got {given} twice. Its items would be there twice.")
        if isinstance(given, Path) and given.exists() and not given.is_dir():
            raise SourceError(f"A dataset must be the folder or URL of shards to be edited, got the file {given}.")
        for written in (_resolve(output / name if name else output) for name in names):
            inside = isinstance(written, Path) and isinstance(place, Path) and place in written.parents
            if written == place or inside or (isinstance(written, Url) and f"{written}/".startswith(f"{place}/")):
                raise OptionError(
                    f"output must be outside of the dataset that is read, got {output} for {given}. Use another "
                    "folder; the dataset that is read does not change."
                )


def _resolve(place: Path | Url) -> Path | Url:
    return place.resolve() if isinstance(place, Path) else place


def _read_manifest(place: Path | Url, store: StoreOptions | None) -> Manifest:
    return open_dataset(place, store=store if isinstance(place, Url) else None)[0]


def _choose_shard_size(manifests: Sequence[Manifest], edits: Edits) -> int:
    """Return the items per shard: as given, by their bytes, or as in the first dataset."""
    if edits.shard_size is not None:
        return edits.shard_size
    first = manifests[0]
    if edits.shard_bytes is None:
        return first.shard_size or int(max(first.table.n_items, default=1)) or 1
    n_bytes = sum(shard.tar_bytes for manifest in manifests for shard in manifest.shards)
    n_bytes -= sum(_dropped_bytes(manifest, edits) for manifest in manifests)
    n_items = sum(manifest.n_items for manifest in manifests)
    return max(1, edits.shard_bytes * n_items // max(1, n_bytes))


def _dropped_bytes(manifest: Manifest, edits: Edits) -> int:
    """Return the bytes of fields of one shape that are dropped; of others it is not known."""
    found = 0
    for name in edits.drop_fields:
        info = manifest.fields.get(name)
        if info is not None and info.dtype is not None and info.shape is not None:
            found += TAR_BLOCK + padded_size(128 + info.dtype.itemsize * int(np.prod(info.shape)))
    return found * manifest.n_items


def _keep_compression(manifests: Sequence[Manifest]) -> Any:
    found = {manifest.compression for manifest in manifests}
    return found.pop() if len(found) == 1 and found <= {*COMPRESSIONS} else "none"


def _keep_layout(manifests: Sequence[Manifest]) -> str:
    """Return the layout of all datasets; each shard chooses its own if they differ."""
    found = {manifest.layout for manifest in manifests}
    return found.pop() if found in ({"samples"}, {"columns"}) else "auto"


def _keep_own(manifests: Sequence[Manifest]) -> dict[str, Any]:
    """Return the metadata of the datasets as a whole that are the same in all of them."""
    first = manifests[0].metadata
    return {
        name: value
        for name, value in first.items()
        if name not in _SET_BY_CONVERSION and all(other.metadata.get(name) == value for other in manifests)
    }


def _keep_classes(manifests: Sequence[Manifest]) -> Mapping[str, Any]:
    """Return the values that the field `label` stands for, if they are the same in all datasets."""
    each = [manifest.metadata.get("conversion", {}).get("classes") for manifest in manifests]
    return {"classes": each[0]} if each[0] is not None and all(found == each[0] for found in each) else {}
