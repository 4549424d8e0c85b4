"""Archives that others wrote: headers, names, whole archives with and without compression, and patterns of paths."""

import bz2
import gzip
import io
import lzma
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from bench.campaign.fuzz.structures import compress_again, mutate_tar
from bench.campaign.fuzz.target import Run, SkippedInput, Target, WrongValueError, clear_folder, put_file
from bench.campaign.fuzz.targets.decoders import save_npy
from penstock import TarSource
from penstock.core.errors import DamageError, OptionError, SourceError
from penstock.shard.index_tars import index_archives
from penstock.shard.names import field_name, field_names, fold_extension, split_name
from penstock.shard.places.archives import expand_archives
from penstock.shard.tar import plain_name, read_members, read_name

__all__ = ["ARCHIVES"]


def _archives() -> Sequence[bytes]:
    found = []
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=form) as archive:
            for number in range(3):
                for suffix, payload in (
                    ("x.npy", save_npy(np.full(3, number, "<f4"))),
                    ("y.json", b'{"a": %d}' % number),
                    ("z" * (80 if form != tarfile.USTAR_FORMAT and number == 2 else 1) + ".txt", b"text"),
                ):
                    name = f"folder{'/deep' * (30 if form != tarfile.USTAR_FORMAT else 1)}/item{number}.{suffix}"
                    member = tarfile.TarInfo(name)
                    member.size = len(payload)
                    archive.addfile(member, io.BytesIO(payload))
        found.append(out.getvalue()[: 512 * 24 + 1024] if len(out.getvalue()) < 10240 else out.getvalue())
    return [*found, gzip.compress(found[0], mtime=0), bz2.compress(found[1]), lzma.compress(found[2], preset=0)]


def _prepare_tar(_: Path) -> Run:
    def run(content: bytes) -> None:
        members = list(read_members(io.BytesIO(content), "input.tar"))
        for member in members:
            payload = content[member.offset : member.offset + member.size]
            end = member.offset + -(-member.size // 512) * 512
            if len(payload) != member.size or payload[: len(member.head)] != member.head:
                raise WrongValueError(f"{member.name!r} is not in the archive")
            if xxhash.xxh3_64_intdigest(content[member.begin : end]) != member.checksum:
                raise WrongValueError(f"{member.name!r} has a wrong checksum")
            if read_name(content[member.begin : member.offset], "input.tar") != member.name:
                raise WrongValueError(f"{member.name!r} is read as another name")
        _compare_with_tarfile(content, [(member.name, member.offset, member.size) for member in members])

    return run


def _compare_with_tarfile(content: bytes, found: list[tuple[str, int, int]]) -> None:
    """Raise if Python's own reader finds other members. It takes a bad header for the end of the archive."""
    try:
        with tarfile.open(fileobj=io.BytesIO(content), encoding="utf-8", errors="surrogateescape") as archive:
            members = archive.getmembers()
    except Exception:  # it refuses some archives that have members of size 0 only
        return
    expected = [(member.name, member.offset_data, member.size) for member in members if member.isreg()]
    if [entry[1:] for entry in expected] != [entry[1:] for entry in found[: len(expected)]]:
        raise WrongValueError("not the members that tarfile finds")


def _prepare_names(_: Path) -> Run:
    def run(content: bytes) -> None:
        if len(content) >= 512:
            plain_name(content[:512])
        name = content.decode(errors="surrogateescape")
        key, suffix = split_name(name)
        if key and f"{key}.{suffix}" != name:
            raise WrongValueError("key and suffix are not the name")
        fold_extension(suffix)
        field_name(suffix)
        if suffix:
            field_names([suffix, f"{suffix}.npy", "x.npy"])
        read_name(content, "input.tar")

    return run


def _prepare_archive(folder: Path) -> Run:
    """Index an archive of another program, and read every item as bytes and decoded."""

    def run(content: bytes) -> None:
        clear_folder(folder)
        put_file(folder / "a.tar", content)
        manifest, problems = index_archives(folder, allow_missing=True, on_skip=lambda _: None)
        if manifest is None:
            if not problems:
                raise WrongValueError("neither a manifest nor a problem")
            return
        items = np.arange(manifest.n_items)
        TarSource(folder, decode=False).take(items)
        TarSource(folder, decode="basic").take(items)

    return run


def _prepare_patterns(folder: Path) -> Run:
    for name in ("a-000000.tar", "a-000001.tar", "b.tar"):
        (folder / name).touch()

    def run(content: bytes) -> None:
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise SkippedInput from error
        if "/" in text or len(text) > 1000:
            raise SkippedInput
        expand_archives(folder / text if text else folder)

    return run


_PATTERNS = (b"a-{000000..000001}.tar", b"*.tar", b"b.tar", b"{a-000000,b}.tar", b"a-00000[01].tar", b"")
_BRACES = (
    b"{0..9}",
    b"{000000..000001}",
    b"{",
    b"}",
    b"..",
    b"{a,b}",
    b"*",
    b"[",
    b"**",
    b"\0",
    b"~",
)
_ALWAYS = (DamageError,)

ARCHIVES = (
    Target(
        "tar", _prepare_tar, _archives, _ALWAYS, (mutate_tar, mutate_tar), (b"12 path=a\n", b"9 size=1\n"), weight=3
    ),
    Target("tar-name", _prepare_names, lambda: [one[:2048] for one in _archives()[:3]], _ALWAYS, (mutate_tar,)),
    Target(
        "archive",
        _prepare_archive,
        _archives,
        (DamageError, SourceError),
        (compress_again(mutate_tar), compress_again(mutate_tar)),
        (b"\x1f\x8b", b"BZh9", b"\xfd7zXZ\0"),
        weight=0.5,
        writes=("*",),
    ),
    Target("patterns", _prepare_patterns, lambda: _PATTERNS, (SourceError, OptionError), (), _BRACES, weight=0.1),
)
