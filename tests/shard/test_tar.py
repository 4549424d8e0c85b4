"""Tar archives, block by block: what we write others read, and what is improper is refused with its place."""

import io
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.core.errors import DamageError, OptionError
from penstock.shard.tar import END, TAR_BLOCK, header, padded_size, read_members
from tests.shard.samples import archive

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def found(content: bytes) -> list[Any]:
    return list(read_members(io.BytesIO(content), "some.tar"))


def refused(content: bytes, match: str) -> DamageError:
    with pytest.raises(DamageError, match=match) as caught:
        found(content)
    assert caught.value.shard == "some.tar"
    return caught.value


def raw(
    name: bytes, payload: bytes = b"", *, size: bytes | None = None, kind: bytes = b"0", ustar: bool = True
) -> bytes:
    """Return one member, header and payload, with any field at will and a checksum that matches."""
    field = b"%011o\0" % len(payload) if size is None else size.ljust(12, b"\0")
    head = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + field + b"00000000000\0" + b" " * 8 + kind
    head += bytes(100) + (b"ustar\x0000" if ustar else bytes(8))
    head = head.ljust(TAR_BLOCK, b"\0")
    return head[:148] + b"%06o\0 " % sum(head) + head[156:] + payload.ljust(padded_size(len(payload)), b"\0")


def pax(records: bytes) -> bytes:
    return raw(b"PaxHeaders/x", records, kind=b"x")


def record(key: str, value: str) -> bytes:
    body = f" {key}={value}\n".encode()
    length = next(n for n in range(len(body), len(body) + 9) if n == len(body) + len(str(n)))
    return b"%d" % length + body


# -- the headers that we write -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 101))
def test_the_standard_library_reads_names_of_up_to_a_hundred_bytes(length: int) -> None:
    name = ("é" * (length // 2) + "a" * (length % 2)) if length > 1 else "a"
    assert len(name.encode()) == length
    content = header(name, 3) + b"abc".ljust(TAR_BLOCK, b"\0") + END
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        (info,) = tar.getmembers()
        read = tar.extractfile(info)
        assert read is not None
        assert (info.name, info.size, info.isreg(), read.read()) == (name, 3, True, b"abc")
    assert [(m.name, m.begin, m.offset, m.size, m.head) for m in found(content)] == [(name, 0, TAR_BLOCK, 3, b"abc")]


def test_a_longer_name_is_refused_with_its_length() -> None:
    with pytest.raises(OptionError, match=r"at most 100 bytes, got .* with 101"):
        header("é" * 50 + "a", 1)


@given(st.text(min_size=1, max_size=100), st.integers(0, 8**11 - 1))
def test_headers_differ_from_those_of_the_standard_library_in_device_numbers_only(name: str, size: int) -> None:
    if not name.isprintable() or len(name.encode()) > 100 or name.endswith("/"):
        name = "plain"
    ours = header(name, size)
    info = tarfile.TarInfo(name)
    info.size = size
    theirs = info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")
    # Bytes 148 to 156 are the sum of the others; 329 to 345 say 0 here and nothing there.
    assert (ours[:148], ours[156:329], ours[345:]) == (theirs[:148], theirs[156:329], theirs[345:])
    assert int(ours[148:154], 8) == sum(ours[:148]) + 8 * 32 + sum(ours[156:])


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs the tar program")
def test_an_archive_is_byte_for_byte_what_gnu_tar_writes(tmp_path: Path) -> None:
    (tmp_path / "a.x.npy").write_bytes(b"0123456789")
    form = ["--format=ustar", "--mtime=@0", "--mode=0644", "--owner=:0", "--group=:0", "--numeric-owner"]
    options = [*form, "-b2", "-cf", "-"]
    theirs = subprocess.run(["tar", *options, "a.x.npy"], cwd=tmp_path, check=True, capture_output=True).stdout
    assert header("a.x.npy", 10) + b"0123456789".ljust(TAR_BLOCK, b"\0") + END == theirs


def test_a_member_of_eight_gigabytes_is_refused() -> None:
    assert len(header("a", 8**11 - 1)) == TAR_BLOCK
    with pytest.raises(OptionError, match="8589934592 bytes"):
        header("a", 8**11)


@given(st.integers(0, 10**7))
@example(0)
@example(512)
@example(513)
def test_padding_reaches_the_next_whole_tar_block(size: int) -> None:
    assert padded_size(size) % TAR_BLOCK == 0
    assert 0 <= padded_size(size) - size < TAR_BLOCK


# -- reading what others wrote -----------------------------------------------------------------------------------------

names = st.text(
    st.characters(codec="utf-8", exclude_categories=("C",), exclude_characters="/"), min_size=1, max_size=130
)


@given(st.lists(st.tuples(names, st.binary(max_size=1200)), max_size=6), st.sampled_from(["gnu", "pax"]))
def test_members_are_found_where_the_standard_library_finds_them(parts: list[tuple[str, bytes]], form: str) -> None:
    parts = [(name, payload) for name, payload in parts if name != ".."]
    content = archive(parts, form=FORMATS[form])
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        theirs = [(info.name, info.offset, info.offset_data, info.size) for info in tar]
    ours = found(content)
    assert [(m.name, m.begin, m.offset, m.size) for m in ours] == theirs
    assert [(m.name, m.head) for m in ours] == parts
    ends = [m.offset + padded_size(m.size) for m in ours]
    assert [m.checksum for m in ours] == [
        xxhash.xxh3_64_intdigest(content[m.begin : end]) for m, end in zip(ours, ends, strict=True)
    ]


def test_a_ustar_name_continues_in_the_prefix() -> None:
    name = "/".join(["folder"] * 20) + "/key.npy"
    assert [m.name for m in found(archive([(name, b"x")]))] == [name]


def test_a_size_in_base_256_is_read() -> None:
    content = raw(b"a.bin", b"abc", size=b"\x80" + (3).to_bytes(11, "big")) + raw(b"b.bin", b"d") + END
    assert [(m.name, m.size, m.head) for m in found(content)] == [("a.bin", 3, b"abc"), ("b.bin", 1, b"d")]


def test_a_size_with_spaces_around_it_is_read() -> None:
    assert [m.size for m in found(raw(b"a.bin", b"abc", size=b"         3 ") + END)] == [3]


@pytest.mark.parametrize("kind", [b"0", b"\0", b"7"])
def test_headers_of_the_oldest_kind_are_read(kind: bytes) -> None:
    assert [(m.name, m.head) for m in found(raw(b"a.bin", b"abc", kind=kind, ustar=False) + END)] == [("a.bin", b"abc")]


def test_folders_are_skipped_whatever_size_they_claim() -> None:
    content = raw(b"data/", size=b"00000007777", kind=b"5") + raw(b"data/a.bin", b"abc") + END
    assert [(m.name, m.begin, m.head) for m in found(content)] == [("data/a.bin", TAR_BLOCK, b"abc")]


def test_a_pax_header_gives_name_and_size() -> None:
    content = pax(record("path", "é/a.bin") + record("size", "3") + record("mtime", "1.5")) + raw(
        b"short", b"abc", size=b"00000000000"
    )
    assert [(m.name, m.size, m.head) for m in found(content + END)] == [("é/a.bin", 3, b"abc")]


def test_a_global_pax_header_without_names_is_skipped() -> None:
    content = raw(b"g", record("comment", "written by git"), kind=b"g") + raw(b"a.bin", b"abc") + END
    assert [m.name for m in found(content)] == ["a.bin"]


def test_only_the_beginning_of_a_payload_is_kept() -> None:
    payload = bytes(range(256)) * 1024
    (member,) = found(archive([("a.bin", payload)]))
    assert member.size == len(payload)
    assert member.head == payload[: 64 << 10]  # the longest header of a .npy that is read


def test_an_empty_archive_has_no_members() -> None:
    assert found(END) == []
    assert found(END + bytes(9 * TAR_BLOCK)) == []


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "what"),
    [(b"1", "hard link"), (b"2", "symbolic link"), (b"3", "device"), (b"4", "device"), (b"6", "pipe")],
)
def test_members_that_are_not_files_are_refused(kind: bytes, what: str) -> None:
    refused(raw(b"a.bin", b"abc") + raw(b"b.bin", kind=kind) + END, rf"'b\.bin' is a {what}")


@pytest.mark.parametrize("kind", [b"S", b"D", b"M", b"V", b"Z"])
def test_members_of_unknown_type_are_refused(kind: bytes) -> None:
    refused(raw(b"b.bin", b"abc", kind=kind) + END, "unknown member type")


@pytest.mark.parametrize("name", ["/etc/passwd", "../a.bin", "a/../../b.bin", "a/.."])
@pytest.mark.parametrize("form", ["plain", "pax", "long"])
def test_names_that_point_outside_are_refused(name: str, form: str) -> None:
    extension = {"plain": b"", "pax": pax(record("path", name)), "long": raw(b"L", name.encode() + b"\0", kind=b"L")}
    plain_name = name.encode() if form == "plain" else b"a.bin"
    refused(extension[form] + raw(plain_name, b"abc") + END, "points outside")


def test_a_name_that_is_empty_is_refused() -> None:
    refused(raw(b"", b"abc") + END, "points outside")


@pytest.mark.parametrize(
    "size", [b"\xff" * 12, b"\xff" + bytes(11), b"zzzzzzzzzzz", b"99999999999", b"-0000000003", b""]
)
def test_a_size_that_is_no_number_is_refused(size: bytes) -> None:
    refused(raw(b"a.bin", b"abc", size=size) + END, "an invalid size")


@pytest.mark.parametrize("size", [b"\x80\x7f" + b"\xff" * 10, b"77777777777"])
def test_an_absurd_size_is_a_truncated_archive_and_takes_no_memory(size: bytes) -> None:
    refused(raw(b"a.bin", b"abc", size=size) + END, "truncated")


@pytest.mark.parametrize("value", ["-3", "three", "", "1e3", "9" * 30])
def test_a_pax_size_that_is_no_number_is_refused(value: str) -> None:
    refused(pax(record("size", value)) + raw(b"a.bin", b"abc") + END, "some.tar")


@pytest.mark.parametrize(
    "records", [b"nonsense", b"12 path=abc", b"99 path=abc\n", b"0 path=a\n", b"10 path=abc", b"\n"]
)
def test_a_malformed_pax_header_is_refused(records: bytes) -> None:
    refused(pax(records) + raw(b"a.bin", b"abc") + END, "PAX header at byte 0 is malformed")


@pytest.mark.parametrize("records", [record("path", "all.bin"), record("size", "1")])
def test_a_global_header_that_names_all_members_alike_is_refused(records: bytes) -> None:
    refused(raw(b"g", records, kind=b"g") + raw(b"a.bin", b"abc") + END, "the same name or size")


def test_a_sparse_file_is_refused() -> None:
    sparse = pax(record("GNU.sparse.major", "1") + record("GNU.sparse.minor", "0") + record("GNU.sparse.name", "a.bin"))
    refused(sparse + raw(b"GNUSparseFile.1/a.bin", b"1\n0\n3\n".ljust(TAR_BLOCK, b"\0") + b"abc") + END, "sparse")


@pytest.mark.parametrize("kind", [b"L", b"K"])
def test_an_extension_header_may_have_a_megabyte(kind: bytes) -> None:
    largest = raw(b"L", b"a.bin".ljust(1 << 20, b"\0"), kind=kind) + raw(b"a.bin", b"abc") + END
    assert [(m.name, m.offset, m.head) for m in found(largest)] == [("a.bin", (1 << 20) + 2 * TAR_BLOCK, b"abc")]
    larger = raw(b"L", b"a.bin".ljust((1 << 20) + 1, b"\0"), kind=kind) + raw(b"a.bin", b"abc") + END
    refused(larger, "the extension header at byte 512 must have at most 1048576 bytes, got 1048577")


@pytest.mark.parametrize(
    ("records", "match"),
    [
        (record("size", "9" * 19), "truncated"),
        (record("size", "9" * 20), "an invalid size"),
        (b"0000000022 path=a.bin\n", "malformed"),  # ten digits
    ],
)
def test_numbers_of_a_pax_header_have_few_digits(records: bytes, match: str) -> None:
    refused(pax(records) + raw(b"b.bin", b"abc") + END, match)
    assert [m.name for m in found(pax(b"000000021 path=a.bin\n") + raw(b"b.bin", b"abc") + END)] == ["a.bin"]


def test_eight_extension_headers_are_read_and_nine_refused() -> None:
    content = pax(record("path", "a.bin")) * 8 + raw(b"b.bin", b"abc") + END
    assert [(m.name, m.begin) for m in found(content)] == [("a.bin", 0)]
    refused(pax(record("path", "a.bin")) + content, "more than 8 extension headers before the member at byte 0")


def test_endless_extension_headers_are_refused() -> None:
    refused(pax(record("path", "a.bin")) * 100 + raw(b"a.bin", b"abc") + END, "more than 8 extension headers")


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"])
def test_an_extension_header_of_absurd_size_is_refused_before_it_is_read(kind: bytes) -> None:
    refused(raw(b"x", size=b"77777777777", kind=kind) + END, "at most 1048576 bytes, got 8589934591")


@pytest.mark.parametrize("extension", [pax(record("path", "a.bin")), raw(b"L", b"a.bin\0", kind=b"L")])
def test_an_extension_header_without_a_member_is_damage(extension: bytes) -> None:
    refused(raw(b"a.bin", b"abc") + extension + END, "some.tar")


def test_every_shortened_archive_is_refused() -> None:
    parts = [raw(b"a.bin", b"abc"), pax(record("path", "b" * 120)), raw(b"b", b"x" * 600), raw(b"data/", kind=b"5")]
    content = b"".join(parts) + END
    for length in range(len(content)):
        refused(content[:length], "truncated")
    assert [m.name for m in found(content)] == ["a.bin", "b" * 120]


def test_every_flipped_bit_of_a_header_is_refused_or_changes_nothing() -> None:
    content = raw(b"a.bin", b"abc") + END
    (whole,) = found(content)
    harmless = []
    for bit in range(8 * TAR_BLOCK):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            (member,) = found(bytes(damaged))
        except DamageError:
            continue
        assert (member.name, member.offset, member.size, member.head) == (
            whole.name,
            whole.offset,
            whole.size,
            whole.head,
        )
        harmless.append(bit // 8)
    # The bytes around the digits of the checksum do not matter: a leading zero, a space, a zero byte.
    assert set(harmless) <= {148, 154, 155}


@pytest.mark.parametrize(
    "after",
    [
        raw(b"lost.bin"),  # a header and nothing else: its block is the second of the two that end an archive
        raw(b"lost.bin", bytes(600)),
        raw(b"lost.bin", b"abc"),
        b"\1".ljust(TAR_BLOCK, b"\0"),
        bytes(TAR_BLOCK) + raw(b"lost.bin", b"abc"),
        bytes(TAR_BLOCK) + b"\1",
        bytes(40 * TAR_BLOCK) + b"\1" + bytes(511),
    ],
    ids=["empty member", "zeros", "member", "byte in the second block", "second archive", "odd byte", "far away"],
)
def test_anything_but_zeros_after_the_end_is_refused(after: bytes) -> None:
    refused(raw(b"a.bin", b"abc") + bytes(TAR_BLOCK) + after + END, "some.tar")


def test_an_archive_that_ends_in_one_tar_block_of_zeros_is_truncated() -> None:
    refused(raw(b"a.bin", b"abc") + bytes(TAR_BLOCK), "truncated")
    refused(raw(b"a.bin", b"abc"), "without the tar blocks that end an archive")
    refused(raw(b"a.bin", b"abc") + raw(b"b.bin")[:200], "it stops at byte 1224, inside a header")
    refused(b"", "truncated")
