"""Changes that keep an input well-formed up to the place that is changed, so that it gets past the first check.

Each reads the input as its format and returns it unchanged if it is none.
"""

import bz2
import gzip
import io
import json
import lzma
import pickletools
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

from bench.campaign.fuzz.mutate import BYTES, EDGES, Mutation

__all__ = ["compress_again", "mutate_chunk", "mutate_json", "mutate_npy", "mutate_pickle", "mutate_tar", "mutate_zip"]

_TEXTS = (
    *(
        "",
        ".",
        "..",
        "../x",
        "/etc/passwd",
        "a/b",
        "\ud800",
        "\0",
        "x" * 300,
        "ä",
        "NaN",
        "Infinity",
        "<f4",
        "|O",
        "-1",
    ),
    *("e" * 5000, "default", "{0..9}", "%s", "${x}", "1e999"),
)


def _draw_value(rng: random.Random) -> Any:
    """Return any value that JSON can hold."""
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: rng.choice(EDGES),
        lambda: rng.choice(EDGES),
        lambda: rng.choice(_TEXTS),
        lambda: rng.choice((None, True, False)),
        lambda: rng.choice((0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"))),
        lambda: [rng.choice(EDGES) for _ in range(rng.choice((0, 1, 2, 3, 40)))],
        lambda: rng.choice(([], {}, [[]], [None], {"a": {}}, [{}])),
        lambda: _nest(rng.choice((30, 3000))),
    )
    return rng.choice(kinds)()


def _nest(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def mutate_json(content: bytes, rng: random.Random) -> bytes:
    """Replace, remove, rename, repeat or move a value anywhere in a JSON document."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return content
    places = list(_places(tree))
    if not places:
        return dump_json(_draw_value(rng))
    parent, key = rng.choice(places)
    choice = rng.randrange(6)
    if choice == 0:
        del parent[key]
    elif choice == 1 and isinstance(parent, dict):
        parent[rng.choice((*_TEXTS, *map(str, parent)))] = parent.pop(key)
    elif choice == 2 and isinstance(parent, list):
        parent.extend([parent[key]] * rng.choice((1, 2, 50)))
    elif choice == 3:
        other, place = rng.choice(places)
        parent[key] = json.loads(dump_json(other[place]))
    elif choice == 4 and type(parent[key]) is int:
        parent[key] += rng.choice((-1, 1, 8, -8, 512, rng.choice(EDGES)))
    else:
        parent[key] = _draw_value(rng)
    return dump_json(tree)


def dump_json(tree: Any) -> bytes:
    """Return JSON, also of what is nested deeper than Python's own encoder goes."""
    try:
        return json.dumps(tree).encode()
    except RecursionError:
        return b"[" * 5000 + b"]" * 5000


def _places(tree: Any) -> Any:
    """Yield every (parent, key) of a document."""
    todo = [tree]
    while todo:
        parent = todo.pop()
        for key in list(parent) if isinstance(parent, dict) else range(len(parent)) if isinstance(parent, list) else ():
            yield parent, key
            todo.append(parent[key])


def mutate_tar(content: bytes, rng: random.Random) -> bytes:
    """Change a field of a header and make its checksum right again, or move whole tar blocks."""
    heads = [at for at in range(0, len(content) - 511, 512) if content[at + 257 : at + 262] == b"ustar"]
    if not heads:
        return content
    at = rng.choice(heads)
    if rng.random() < 0.2:
        size = 512 * rng.choice((1, 1, 2, 3))
        return rng.choice((content[:at] + content[at + size :], content[:at] + content[at : at + size] + content[at:]))
    block = bytearray(content[at : at + 512])
    start, width = rng.choice(
        ((0, 100), (100, 8), (124, 12), (124, 12), (156, 1), (156, 1), (157, 100), (257, 8), (345, 155))
    )
    block[start : start + width] = _tar_field(start, width, bytes(block[start : start + width]), rng)
    block[148:156] = b"%06o\0 " % (sum(block) - sum(block[148:156]) + 256)
    return content[:at] + bytes(block) + content[at + 512 :]


def _tar_field(start: int, width: int, old: bytes, rng: random.Random) -> bytes:
    if start == 124:
        number = rng.choice(EDGES)
        if rng.random() < 0.3 or not 0 <= number < 8**11:
            return b"\x80" + (number % (1 << 88)).to_bytes(11, "big")
        return b"%011o\0" % number
    if start == 156:
        return rng.choice([bytes([kind]) for kind in b"01234567xgLKSVMDN\0"])
    names = (
        b"",
        b"../x.npy",
        b"/x.npy",
        b"a.npy",
        b"a.b.json",
        b".hidden.txt",
        b"\xff\xfe.npy",
        b"x" * 100,
        b"a/b.c.pyd",
    )
    return rng.choice((*names, rng.choice(BYTES)(old, rng)))[:width].ljust(width, b"\0")


def mutate_npy(content: bytes, rng: random.Random) -> bytes:
    """Write another dtype, order or shape into the header of a .npy, whose length stays right."""
    if content[:6] != b"\x93NUMPY" or len(content) < 12:
        return content
    end = 10 + int.from_bytes(content[8:10], "little")
    descr = rng.choice(
        ("'<f4'", "'|O'", "'>i8'", "'<U4'", "'|V7'", "'<M8[ns]'", "[('a', '<f4'), ('b', '|S3')]", "'|S0'",
         "('<f4', (2,))", "[('a', '|O')]", "None", "'x'", "5", "'<f4" + "a" * 50 + "'", "[]",
         "[('a','<f4',(99999999999,))]")
    )  # fmt: skip
    shape = rng.choice(
        ("()", "(0,)", "(3,)", "(2, 3)", "(-1,)", "(4611686018427387904, 4)", "(1099511627776,)", "(0, 1099511627776)",
         "3", "(3.0,)", "(True,)", "('3',)", "(" + "1," * 70 + ")", "(3" + "0" * 5000 + ",)", "[2]", "(2**9,)")
    )  # fmt: skip
    order = rng.choice(("True", "False", "False", "1", "None", "[]"))
    text = rng.choice(
        (
            f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}",
            f"{{'descr': {descr}}}",
            "[" * 900,
            "{}",
        )
    ).encode()
    version = rng.choice((b"\1\0", b"\1\0", b"\2\0", b"\3\0"))
    return b"\x93NUMPY" + version + len(text).to_bytes(2 if version[0] == 1 else 4, "little") + text + content[end:]


_OPERATIONS = (
    *(b"}", b"]", b")", b"(", b"t", b"N", b"R", b"b", b"s", b"u", b"a", b"e", b"0", b"1", b"2", b"o", b"i", b"Q"),
    *(b"\x81", b"\x85", b"\x86", b"\x87", b"\x8f", b"\x90", b"\x91", b"\x92", b"\x94", b"h\x00"),
    *(b"K\xff", b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", b"Vx\n", b"I1\n", b"I" + b"9" * 5000 + b"\n"),
    *(b"j\xff\xff\xff\x7f", b"r\xff\xff\xff\xff", b"p4294967296\n", b"B\xff\xff\xff\xff", b"\x95" + b"\xff" * 8),
    *(b"cos\nsystem\n", b"cnumpy\ndtype\n", b"cnumpy.core.multiarray\n_reconstruct\n", b"c_codecs\nencode\n"),
    *(b"cnumpy.core.multiarray\nscalar\n", b"ccollections\nOrderedDict\n", b"ctorch._utils\n_rebuild_tensor_v2\n"),
    *(b"cbuiltins\n%b\n" % name for name in (b"set", b"frozenset", b"complex", b"bytearray", b"bytes")),
)


def mutate_pickle(content: bytes, rng: random.Random) -> bytes:
    """Remove, repeat, swap or replace operations of a pickle."""
    try:
        starts = [at for _, _, at in pickletools.genops(content) if at is not None]
    except Exception:  # of damaged pickles it may raise anything
        return content
    parts = [content[a:b] for a, b in zip(starts, [*starts[1:], len(content)], strict=True)]
    at = rng.randrange(len(parts))
    choice = rng.randrange(5)
    if choice == 0:
        del parts[at]
    elif choice == 1:
        parts.insert(at, parts[rng.randrange(len(parts))] * rng.choice((1, 1, 2, 40)))
    elif choice == 2:
        other = rng.randrange(len(parts))
        parts[at], parts[other] = parts[other], parts[at]
    elif choice == 3:
        parts.insert(at, rng.choice(_OPERATIONS))
    else:
        parts[at] = rng.choice(_OPERATIONS)
    return b"".join(parts)


def mutate_zip(inner: Mutation) -> Mutation:
    """Return a mutation of one member of a zip archive, whose checksums and directory are written again."""

    def mutate_member(content: bytes, rng: random.Random) -> bytes:
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                members = [(entry.filename, archive.read(entry)) for entry in archive.infolist()[:64]]
        except Exception:  # of damaged archives it may raise anything
            return content
        if not members:
            return content
        at = rng.randrange(len(members))
        name, payload = members[at]
        choice = rng.randrange(6)
        if choice == 0:
            members[at] = (rng.choice(("", "../x", "x.npy", "data.pkl", name + "/", name.upper())), payload)
        elif choice == 1:
            members.insert(at, members[rng.randrange(len(members))])
        elif choice == 2:
            members[at] = (name, bytes(rng.choice((0, 1, 1 << 16, 1 << 20))))
        else:
            members[at] = (name, rng.choice((inner, rng.choice(BYTES)))(payload, rng))
        out = io.BytesIO()
        try:
            with zipfile.ZipFile(out, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
                for name, payload in members:
                    archive.writestr(zipfile.ZipInfo(name), payload, archive.compression)
        except Exception:  # names that a zip cannot have
            return content
        return out.getvalue()

    return mutate_member


_COMPRESSIONS: dict[bytes, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    b"\x1f\x8b": (gzip.decompress, lambda plain: gzip.compress(plain, 1, mtime=0)),
    b"BZh": (bz2.decompress, lambda plain: bz2.compress(plain, 1)),
    b"\xfd7zXZ\0": (lzma.decompress, lambda plain: lzma.compress(plain, preset=0)),
}


def compress_again(inner: Mutation) -> Mutation:
    """Return a mutation of what a gzip, bzip2 or xz file holds; of other files, of the file itself."""

    def mutate_plain(content: bytes, rng: random.Random) -> bytes:
        for magic, (decompress, compress) in _COMPRESSIONS.items():
            if content.startswith(magic):
                try:
                    return compress(inner(decompress(content), rng))
                except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError):
                    return content
        return inner(content, rng)

    return mutate_plain


_CHUNKS = (b"fmt ", b"data", b"RIFF", b"ds64", b"COMM", b"SSND", b"FORM", b"fact", b"OggS")


def mutate_chunk(content: bytes, rng: random.Random) -> bytes:
    """Change the size, name or content of a chunk of a RIFF or AIFF file, or of a page of an Ogg file."""
    words = [at for word in _CHUNKS if (at := content.find(word)) >= 0]
    if not words:
        return content
    at = rng.choice(words)
    order = ">" if content[:4] in (b"FORM", b"RIFX") else "<"
    value = struct.pack(f"{order}I", rng.choice(EDGES) % (1 << 32))
    place = at + rng.choice((4, 4, 8, 10, 12, 16, 20, 22, 24))
    return content[:place] + value[: rng.choice((2, 4))] + content[place + 4 :]
