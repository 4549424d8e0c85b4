"""Files of a dataset: side indexes, manifests, shard tables, and whole datasets that are damaged."""

import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import xxhash

from bench.campaign.fuzz.mutate import BYTES, Mutation
from bench.campaign.fuzz.structures import mutate_json, mutate_tar
from bench.campaign.fuzz.target import (
    Run,
    SkippedInput,
    Target,
    WrongValueError,
    put_file,
    select_file,
)
from penstock import TarSource
from penstock.core.errors import DamageError, PenstockError, ReadError, SourceError
from penstock.recipes.webdataset import WebDatasetWriter
from penstock.shard.manifest import MANIFEST, Manifest
from penstock.shard.side_index import SideIndex
from penstock.shard.summary import find_problems, summarize
from penstock.shard.table import ShardTable
from penstock.shard.verify import verify_shards

__all__ = ["SHARDS"]

_CHECKSUM = 16  # bytes at the end of a side index and of a shard table


@cache
def _dataset_files() -> Mapping[str, bytes]:
    """Return the files of a small dataset, by name: fixed and varying fields, text, JSON and images of bytes."""
    with tempfile.TemporaryDirectory() as folder:
        with WebDatasetWriter(folder, shard_size=3) as writer:
            for number in range(5):
                fixed = np.full((2, 3), number, np.float32)
                sample = {"x": fixed, "v": np.arange(number), "t": f"item {number}", "j": {"n": number}, "n": number}
                writer.write_sample(sample)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def _dataset_seeds() -> Sequence[bytes]:
    return [name.encode() + b"\n" + content for name, content in _dataset_files().items()]


def _write_dataset(folder: Path) -> None:
    for name, content in _dataset_files().items():
        (folder / name).write_bytes(content)


def _read_items(folder: Path) -> list[str]:
    source = TarSource(folder)
    block = source.take(np.arange(len(source.index)))
    return [repr([block[name][number] for name in sorted(block)]) for number in range(len(source.index))]


def _prepare_dataset(folder: Path) -> Run:
    """Replace one file of a dataset by damaged bytes: the items are those that were written, or there is an error."""
    _write_dataset(folder)
    expected = _read_items(folder)

    def run(content: bytes) -> None:
        with _Replaced(folder, content):
            error = None
            try:
                found = _read_items(folder)
            except PenstockError as caught:
                error = caught
            _, problems = verify_shards(folder)
            if error is not None:
                if not problems:
                    raise WrongValueError(f"verify finds no problem, but reading does: {error}")
                raise error
            if found != expected:
                raise WrongValueError("not the items that were written")

    return run


class _Replaced:
    """Puts an input, NAME and content, in place of a file of a dataset, and the file back afterwards."""

    def __init__(self, folder: Path, content: bytes, seal: Callable[[bytes], bytes] = lambda stored: stored) -> None:
        name, newline, stored = content.partition(b"\n")
        if not newline or name.decode(errors="replace") not in _dataset_files():
            raise SkippedInput
        self._path, self._stored = folder / name.decode(), seal(stored)

    def __enter__(self) -> None:
        put_file(self._path, self._stored)

    def __exit__(self, *_: object) -> None:
        put_file(self._path, _dataset_files()[self._path.name])


def _seal(stored: bytes) -> bytes:
    """Give a side index or a shard table the right checksum."""
    return stored[:-_CHECKSUM] + xxhash.xxh3_128_digest(stored[:-_CHECKSUM])


def seal_manifest(stored: bytes) -> bytes:
    """Give a manifest or a run file the right checksum."""
    try:
        tree = json.loads(stored)
        if not isinstance(tree, dict):
            return stored
        tree.pop("checksum", None)
        ascii_only = "penstock_run" in tree
        text = json.dumps(tree, sort_keys=True, ensure_ascii=ascii_only)
        tree["checksum"] = xxhash.xxh3_64_hexdigest(text.encode())
        return json.dumps(tree).encode()
    except (ValueError, RecursionError):
        return stored


def _prepare_side_index(_: Path) -> Run:
    def run(content: bytes) -> None:
        index = SideIndex.from_bytes(_seal(content), "input.index")
        again = SideIndex.from_bytes(index.to_bytes(), "again.index")
        rows = np.arange(index.n_items)
        for one, two in zip(index.columns, again.columns, strict=True):
            same = all(
                (getattr(one, name).at(rows) == getattr(two, name).at(rows)).all()
                for name in ("begins", "offsets", "sizes")
            )
            if not same or (one.checksums != two.checksums).any() or one.shape != two.shape:
                raise WrongValueError(f"{one.suffix!r} differs after writing and reading")

    return run


def _prepare_native(folder: Path) -> Run:
    """Read a dataset through a side index of an attacker, who makes all checksums right, also in the manifest."""
    _write_dataset(folder)
    manifest = json.loads(_dataset_files()[MANIFEST])
    entry = manifest["shards"][0]

    def run(content: bytes) -> None:
        stored = _seal(content)
        entry["index_digest"] = xxhash.xxh3_128_hexdigest(stored)
        try:
            head = json.loads(stored[24 : 24 + int.from_bytes(stored[16:24], "little")])
            entry["num_samples"], entry["tar_bytes"] = int(head["items"]), int(head["tar_bytes"])
        except (ValueError, LookupError, TypeError, RecursionError, OverflowError):
            pass
        entry["stored_bytes"] = entry["tar_bytes"]
        tar = _dataset_files()["shard_000000.tar"]
        put_file(folder / "shard_000000.tar", tar[: entry["tar_bytes"]].ljust(min(entry["tar_bytes"], 1 << 18), b"\0"))
        put_file(folder / "shard_000000.tar.index", stored)
        put_file(folder / MANIFEST, seal_manifest(json.dumps(manifest).encode()))
        for verify in ("first", "never"):
            source = TarSource(folder, verify=verify)  # type: ignore[arg-type]  # a loop over literals
            if len(source.index) > 100_000:
                raise SkippedInput
            source.take(np.arange(len(source.index)))

    return run


def _prepare_manifest(folder: Path) -> Run:
    _write_dataset(folder)

    def run(content: bytes) -> None:
        put_file(folder / MANIFEST, seal_manifest(content))
        manifest = Manifest.read(folder / MANIFEST)
        json.dumps(summarize(manifest))
        find_problems(manifest)
        source = TarSource(folder)
        source.take(np.array([0, len(source.index) - 1]))

    return run


@cache
def _table_bytes() -> bytes:
    manifest = json.loads(_dataset_files()[MANIFEST])
    entries = [dict(entry, shard_name=f"shard_{number}.tar") for number in range(3) for entry in manifest["shards"]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / MANIFEST
        path.write_bytes(seal_manifest(json.dumps({**manifest, "shards": entries}).encode()))
        found = Manifest.read(path)
        return found.table.to_bytes(json.dumps({"format": "penstock-shards"}).encode(), b"manifest")


def _prepare_table(_: Path) -> Run:
    digest = xxhash.xxh3_128_digest(b"manifest")

    def run(content: bytes) -> None:
        at = 16 + 32
        table, _ = ShardTable.from_bytes(_seal(content[:at] + digest + content[at + 16 :]), digest)
        entries = list(table)
        if ShardTable.from_entries(entries) != table:
            raise WrongValueError("the table is not that of its entries")
        table.digest  # noqa: B018  # computed

    return run


def _mutate_head(content: bytes, rng: random.Random) -> bytes:
    """Change the JSON head of a side index, and give it its length; or a number of its arrays."""
    size = int.from_bytes(content[16:24], "little")
    if rng.random() < 0.3 or size > len(content):
        at = 24 + size + 8 * rng.randrange(max(1, (len(content) - 24 - size) // 8))
        return content[:at] + rng.choice(BYTES)(content[at : at + 8], rng)[:8].ljust(8, b"\0") + content[at + 8 :]
    head = mutate_json(content[24 : 24 + size], rng)
    head += b" " * (-len(head) % 8)
    return content[:16] + len(head).to_bytes(8, "little") + head + content[24 + size :]


def _shorten_member(content: bytes, rng: random.Random) -> bytes:
    """Let members begin some bytes before their payload, without a whole header, or at the very end of the file."""
    size = int.from_bytes(content[16:24], "little")
    try:
        tree = json.loads(content[24 : 24 + size])
        column = rng.choice(tree["columns"])
        offset, step = column["offsets"] or (512, 0)
        if rng.random() < 0.3:
            offset = rng.choice((1, 8, 63, tree["tar_bytes"], tree["tar_bytes"] - 1, tree["tar_bytes"] - 512))
        column["offsets"] = [offset, step]
        column["begins"] = [offset - rng.choice((1, 2, 7, 8, 16, 63, 64, 65, 512)), step]
        if rng.random() < 0.7:
            column["sizes"], column["shape"], column["dtype"] = [rng.choice((0, 0, 1, 8, 63)), 0], None, None
    except (ValueError, LookupError, TypeError, RecursionError):
        return content
    head = json.dumps(tree).encode()
    head += b" " * (-len(head) % 8)
    return content[:16] + len(head).to_bytes(8, "little") + head + content[24 + size :]


def _side_indexes() -> Sequence[bytes]:
    return [content for name, content in _dataset_files().items() if name.endswith(".index")]


_DATASET_MUTATIONS: tuple[Mutation, ...] = tuple(map(select_file, (*BYTES, mutate_json, mutate_tar)))
_ALWAYS = (DamageError,)

SHARDS = (
    Target("dataset", _prepare_dataset, _dataset_seeds, (DamageError, SourceError), _DATASET_MUTATIONS, weight=0.3),
    Target("side-index", _prepare_side_index, _side_indexes, _ALWAYS, (_mutate_head,), weight=2),
    Target(
        "native",
        _prepare_native,
        _side_indexes,
        (DamageError, SourceError, ReadError),
        (_mutate_head, _shorten_member),
        weight=1,
    ),
    Target(
        "manifest",
        _prepare_manifest,
        lambda: [_dataset_files()[MANIFEST]],
        (DamageError, SourceError),
        (mutate_json, mutate_json),
        (b"\\ud800", b"null", b"1e400"),
        weight=1,
    ),
    Target("shard-table", _prepare_table, lambda: [_table_bytes()], (ValueError,), weight=1),
)
