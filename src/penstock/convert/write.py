"""Write the items of any source as shards: chosen, sorted, merged, renamed or changed by a function."""

import hashlib
import inspect
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.convert.convert import Existing, convert, existing_from_flags
from penstock.convert.engines import Engine, choose_engine
from penstock.convert.inputs.source import SourceInput
from penstock.convert.plan import Chosen
from penstock.convert.scan import ConvertOptions, ProgressCallback
from penstock.convert.splits import WHOLE, Split
from penstock.convert.to_shards import list_notes, log_notes, summaries
from penstock.core.checks import check_integer
from penstock.core.errors import ConversionError, OptionError, ReadError, SourceError
from penstock.core.protocols import Source, Transform
from penstock.core.seeds import check_seed
from penstock.core.text import name_once
from penstock.files.progress import track_phases
from penstock.files.spans.options import RemoteOptions
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url, is_url, parse_place
from penstock.shard.compression import COMPRESSIONS
from penstock.shard.manifest import Manifest
from penstock.shard.outputs.write_options import WriteOptions
from penstock.source.combine import find_origins
from penstock.source.select.selectable import as_stored
from penstock.source.tar.source import TarSource
from penstock.source.wrapper import list_leaves

__all__ = ["write_chosen", "write_source"]

_Int64s = NDArray[np.int64]

_SET_BY_CONVERSION = ("conversion", "identity")


def write_source(
    source: Source | Mapping[str, Source],
    output: str | os.PathLike[str] | Url,
    *,
    transform: Transform | None = None,
    seed: int = 0,
    shard_size: int | None = None,
    shard_bytes: int | None = None,
    workers: int = 1,
    executor: Executor | None = None,
    resume: bool = False,
    overwrite: bool = False,
    show_progress: bool = True,
    store: StoreOptions | None = None,
) -> dict[str, Any]:
    """Write the items of a source as shards, in their order, and return the summary of the manifest.

    What is read does not change. The dataset appears when it is complete; its manifest says what it was made of. The
    bytes are the same for any number of workers, interrupted and resumed or not.

    Of a dataset of shards, every byte is verified, files such as images are copied as they are stored, and ids that are
    not automatic, compression, layout and metadata of the dataset stay as they are.

    Parameters
    ----------
    source
        Any source; or one for each name of a split, such as `source.split(train=0.8, val=0.2)`: one dataset for each is
        written below `output`, and the summaries are returned by name.
    output
        The folder or URL of the new dataset, outside of those that are read.
    transform
        Called as `transform(item, rng)` for each item; returns a dict of fields. The metadata of an item stay unless it
        returns others. Its generator depends on `seed` and the item alone.
    shard_size, shard_bytes
        Items per shard, or about how many bytes a shard has. Both None: as in the dataset that is read, or 1000 items.
    workers, executor
        Number of processes that write shards; more than one need a transform that is defined in a module. An executor
        of `concurrent.futures` does it instead, as in `convert_to_shards`.
    resume, overwrite
        Resume the interrupted write of the same items; replace the dataset at the output.
    show_progress
        Show progress on standard error.
    store
        How the URL of the output is reached.

    Examples
    --------
    >>> import tempfile
    >>> from penstock.source.array import ArraySource
    >>> source = ArraySource({"x": np.arange(10), "label": np.arange(10) % 3}).where("label == 2")
    >>> write_source(source, f"{tempfile.mkdtemp()}/twos", show_progress=False)["total_samples"]
    3
    """
    existing, where = existing_from_flags(resume=resume, overwrite=overwrite), parse_place(output)
    how: dict[str, Any] = {"transform": transform, "seed": seed, "shard_size": shard_size, "shard_bytes": shard_bytes}
    how |= {"engine": choose_engine(workers, executor), "existing": existing, "store": store}
    with track_phases(show=show_progress) as bar:
        manifests = write_chosen(source, where, on_progress=bar, **how)
    log_notes(list_notes(manifests), where)
    return summaries(manifests)


def write_chosen(
    source: Source | Mapping[str, Source],
    output: Path | Url,
    *,
    engine: Engine,
    transform: Transform | None = None,
    seed: int = 0,
    shard_size: int | None = None,
    shard_bytes: int | None = None,
    existing: Existing = "refuse",
    on_progress: ProgressCallback | None = None,
    store: StoreOptions | None = None,
) -> dict[str, Manifest]:
    """Do as `write_source`, on an engine, and return the manifest of each part."""
    parts = dict(source) if isinstance(source, Mapping) else {WHOLE: source}
    leaves = list({id(leaf): leaf for part in parts.values() for leaf in list_leaves(part)}.values())
    _check_output(leaves, output, list(parts))
    if transform is not None and engine.workers > 1:
        _check_picklable(transform)
    inputs: dict[Any, SourceInput] = {}
    runs: dict[str, _Int64s] = {}
    for name, part in parts.items():
        if not len(part.index):
            raise SourceError(f"There must be items to write, but {part!r} has none.")
        if transform is None:
            as_stored(part)  # whose errors are about the names that were given
        origins, which, numbers = find_origins(part, np.arange(len(part.index)))
        keys = []
        for origin in origins:
            given = _make_input(origin, transform, check_seed(seed))
            keys.append((given, *map(id, list_leaves(origin))))
            inputs.setdefault(keys[-1], given)
        places = np.array([list(inputs).index(key) for key in keys])
        runs[name] = _find_runs(places[which], numbers)
    manifests = [leaf.manifest for leaf in leaves if isinstance(leaf, TarSource)]
    sizes = {name: len(part.index) for name, part in parts.items()}
    total = sum(sizes.values())
    split = Split() if list(parts) == [WHOLE] else Split(tuple((name, n / total) for name, n in sizes.items()))
    write = _keep_form(manifests if len(manifests) == len(leaves) else [], shard_size, shard_bytes)
    chosen = Chosen(runs, {**_keep_classes(manifests), "source": _describe(parts, transform)})
    how: dict[str, Any] = {"engine": engine, "existing": existing, "on_progress": on_progress, "store": store}
    try:
        return convert(list(inputs.values()), output, ConvertOptions(write, split), chosen=chosen, **how)
    except ConversionError as error:
        reasons = "\n".join(name_once(path, reason) for path, reason in error.reasons.items())
        raise ReadError(f"{reasons}\nNothing was published.") from error


def _make_input(source: Source, transform: Transform | None, seed: int) -> SourceInput:
    """Return a source as an input, with the files that it reads."""
    leaves = list_leaves(source)
    shards = [leaf for leaf in leaves if isinstance(leaf, TarSource)]
    remote = next((RemoteOptions(leaf._spec.archives.options.store) for leaf in shards if leaf._spec.archives), None)
    places = tuple(place for leaf in leaves for place in _find_places(leaf) if isinstance(place, Path) or remote)
    digest = hashlib.blake2b(source.index.content_digest.encode(), digest_size=16)
    digest.update(repr([(name, str(known.dtype), known.shape) for name, known in source.fields.items()]).encode())
    digest.update(b"" if transform is None else _hash_code(transform).encode())
    about: dict[str, Any] = {"format": "shards" if shards else "source"}
    if len(shards) == 1:
        about |= _list_origin(shards[0].manifest)
    elif shards:
        about["sources"] = [_list_origin(leaf.manifest) for leaf in shards]
    path = places[0] if places else Path(type(source).__name__)
    return SourceInput(path, digest.hexdigest(), source, transform, seed, about, places, remote)


def _list_origin(manifest: Manifest) -> dict[str, Any]:
    conversion = manifest.metadata.get("conversion")
    return {"fingerprint": manifest.fingerprint, **({} if conversion is None else {"conversion": conversion})}


def _find_places(leaf: Source) -> list[Path | Url]:
    """Return the files and folders that a source reads, as far as it names them; the URL of shards."""
    if isinstance(leaf, TarSource):
        return [leaf.manifest.folder]
    named = [getattr(leaf, "path", None), *(getattr(leaf, "files", None) or ())]
    paths = [Path(place) for place in named if isinstance(place, str | os.PathLike) and not is_url(place)]
    # Of an array in an HDF5 file, the file.
    found = [path if path.exists() else next((near for near in path.parents if near.is_file()), None) for path in paths]
    return list(dict.fromkeys(path for path in found if path is not None))


def _find_runs(which: _Int64s, numbers: _Int64s) -> _Int64s:
    """Return items as runs of consecutive ones: rows of (number of an input, start, stop)."""
    begins = np.ones(len(numbers), np.bool_)
    begins[1:] = (np.diff(numbers) != 1) | (np.diff(which) != 0)
    starts = np.flatnonzero(begins)
    ends = np.append(starts[1:], len(numbers)) - 1
    return np.stack([which[starts], numbers[starts], numbers[ends] + 1], axis=1)


def _check_output(leaves: Sequence[Source], output: Path | Url, names: Sequence[str]) -> None:
    """Raise OptionError if a dataset would be written into one that is read."""
    for place in (place for leaf in leaves for place in _find_places(leaf)):
        for written in (output / name if name else output for name in names):
            inside = isinstance(place, Url) and f"{written}/".startswith(f"{place}/")
            if isinstance(place, Path) and isinstance(written, Path):
                inside = place.resolve() in (written.resolve(), *written.resolve().parents)
            if inside:
                raise OptionError(
                    f"output must be outside of the dataset that is read, got {output} for {place}. Use another "
                    "folder; the dataset that is read does not change."
                )


def _keep_form(manifests: Sequence[Manifest], shard_size: int | None, shard_bytes: int | None) -> WriteOptions:
    """Return how shards are written: as those that are read, as far as nothing else is given."""
    given = {"shard_size": shard_size, "shard_bytes": shard_bytes}
    for name in (name for name, value in given.items() if value is not None):
        check_integer(name, given[name], at_least=1)
    if shard_size is not None and shard_bytes is not None:
        raise OptionError(
            f"At most one of shard_size and shard_bytes must be given, got {shard_size} and {shard_bytes}."
        )
    if not manifests:
        if shard_bytes is not None:
            raise OptionError(f"shard_bytes is for datasets of shards, got {shard_bytes}. Give shard_size.")
        return WriteOptions() if shard_size is None else WriteOptions(shard_size)
    first = manifests[0]
    size = shard_size or first.shard_size or int(max(first.table.n_items, default=1)) or 1
    if shard_bytes is not None:
        n_bytes = sum(shard.tar_bytes for manifest in manifests for shard in manifest.shards)
        size = max(1, shard_bytes * sum(manifest.n_items for manifest in manifests) // max(1, n_bytes))
    compressions, layouts = ({getattr(one, name) for one in manifests} for name in ("compression", "layout"))
    own = {
        name: value
        for name, value in first.metadata.items()
        if name not in _SET_BY_CONVERSION and all(other.metadata.get(name) == value for other in manifests)
    }
    kept: Any = {
        "compression": first.compression if len(compressions) == 1 and compressions <= {*COMPRESSIONS} else "none",
        "layout": first.layout if layouts in ({"samples"}, {"columns"}) else "auto",
    }
    return WriteOptions(size, metadata=own, **kept)


def _keep_classes(manifests: Sequence[Manifest]) -> Mapping[str, Any]:
    """Return the values that the field `label` stands for, if they are the same in all datasets."""
    each = [manifest.metadata.get("conversion", {}).get("classes") for manifest in manifests]
    return {"classes": each[0]} if each and each[0] is not None and all(found == each[0] for found in each) else {}


def _describe(parts: Mapping[str, Source], transform: Transform | None) -> dict[str, Any]:
    """Return what was written, for the manifest, without the folders that datasets lie in."""
    found = {}
    for name, part in parts.items():
        text = repr(part)
        for leaf in list_leaves(part):
            for place in (*_find_places(leaf), getattr(leaf, "path", None) or "-"):
                text = text.replace(str(place), str(place).rstrip("/").rpartition("/")[2])
        found[name or "items"] = text
    return found if transform is None else {**found, "transform": re.sub(r" at 0x[0-9a-f]+", "", repr(transform))}


def _hash_code(transform: Transform) -> str:
    """Return a hash of the source code and the settings of a transform: with others, shards are not kept."""
    digest = hashlib.blake2b(digest_size=8)
    for step in getattr(transform, "steps", (transform,)):
        function = getattr(step, "function", step)
        while isinstance(function, partial):
            function = function.func
        code = function if inspect.isroutine(function) else type(function)
        try:
            digest.update(inspect.getsource(code).encode())
        except (OSError, TypeError):  # not written in Python, or typed in
            digest.update(getattr(getattr(code, "__code__", None), "co_code", b""))
        digest.update(re.sub(r" at 0x[0-9a-f]+", "", repr(getattr(step, "function", step))).encode())
    return digest.hexdigest()


def _check_picklable(transform: Transform) -> None:
    try:
        pickle.dumps(transform)
    except Exception as error:  # objects that it carries along may raise anything
        raise OptionError(
            f"With several workers, what changes items must be picklable, but {transform!r} is not: {error}. Define it "
            "at the top level of a module, or use workers=1."
        ) from error
