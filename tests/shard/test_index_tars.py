"""Foreign archives are indexed without changing a byte, and ambiguous ones are reported, never merged."""

import gzip
import inspect
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from penstock_test_shards import npy

from penstock import TarSource
from penstock.core.errors import DamageError, SourceError
from penstock.shard.compression import make_compressor
from penstock.shard.index_tars import Problem, index_archives
from penstock.shard.manifest import MANIFEST
from penstock.shard.places.archives import expand_archives
from penstock.shard.verify import verify_shards
from tests.shard.samples import archive, contents


def item(number: int) -> list[tuple[str, bytes]]:
    return [(f"item{number}.cls", b"%d" % number), (f"item{number}.json", json.dumps({"n": number}).encode())]


def put(folder: Path, name: str, members: list[tuple[str, bytes]], **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    content = archive(members, **options)
    (folder / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    return folder / name


def classes(where: str | Path) -> list[int]:
    source = TarSource(where)
    return source.take(np.arange(len(source.index)))["cls"].tolist()


def problems_of(folder: Path, **options: Any) -> list[tuple[str, int | None, str]]:
    before = contents(folder)
    manifest, problems = index_archives(folder, **options)
    assert manifest is None
    assert problems
    assert contents(folder) == before, "nothing is written where something is wrong"
    return [(problem.shard, problem.item, problem.reason) for problem in problems]


# -- tars of the webdataset library ------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [False, True])
def test_shards_of_the_webdataset_library_are_read(compress: bool, tmp_path: Path) -> None:
    pattern = str(tmp_path / f"train-%06d.tar{'.gz' if compress else ''}")
    with webdataset.ShardWriter(pattern, maxcount=3, verbose=0) as sink:
        for number in range(7):
            sink.write(
                {
                    "__key__": f"sample/{number:03d}",
                    "x.npy": np.full((2, 3), number, np.float32),
                    "json": {"n": number, "text": "é"},
                    "cls": number,
                    "note.txt": f"note {number}",
                    "ragged.npy": np.arange(number),
                    "data.pyd": {"x": np.arange(number)},
                }
            )
    before = contents(tmp_path)
    manifest, problems = index_archives(tmp_path, workers=2)
    assert problems == []
    assert manifest is not None
    assert {name: content for name, content in contents(tmp_path).items() if name in before} == before
    assert [shard.n_items for shard in manifest.shards] == [3, 3, 1]
    assert manifest.compression == ("gz" if compress else "none")
    source = TarSource(tmp_path)
    found = source.take(np.array([6, 0, 3]))
    assert found["x"].dtype == np.float32
    assert found["x"][:, 0, 0].tolist() == found["cls"].tolist() == [6, 0, 3]
    assert found["json"].tolist() == [{"n": n, "text": "é"} for n in (6, 0, 3)]
    assert found["note"].tolist() == ["note 6", "note 0", "note 3"]
    assert [x.tolist() for x in found["ragged"]] == [list(range(6)), [], [0, 1, 2]]
    assert [x["x"].tolist() for x in found["data"]] == [list(range(6)), [], [0, 1, 2]]
    assert verify_shards(tmp_path)[1] == []


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_in_any_format_are_read(form: int, tmp_path: Path) -> None:
    folder = "f" * 60
    members = [(f"{folder}/{'n' * 70}{number}.cls", b"%d" % number) for number in range(3)]
    put(tmp_path, "a.tar", members, form=form)
    assert index_archives(tmp_path)[1] == []
    assert classes(tmp_path) == [0, 1, 2]


def test_folders_and_hidden_files_in_an_archive_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    with tarfile.open(tmp_path / "set" / "a.tar", "w") as tar:
        (tmp_path / "data").mkdir()
        tar.add(tmp_path / "data", "data")
        for name, content in [("a.cls", "1"), (".DS_Store", "x"), ("b.cls", "2")]:
            (tmp_path / name).write_text(content)
            tar.add(tmp_path / name, f"data/{name}")
    skipped: list[Any] = []
    assert index_archives(tmp_path / "set", on_skip=skipped.append)[1] == []
    assert list(map(str, skipped)) == ["a.tar: 1 hidden file was skipped: 'data/.DS_Store'"]
    assert classes(tmp_path / "set") == [1, 2]
    assert verify_shards(tmp_path / "set")[1] == []


@pytest.mark.parametrize("compression", ["gz", "bz2", "xz"])
def test_compressed_archives_are_read_whatever_they_are_called(compression: Any, tmp_path: Path) -> None:
    engine = make_compressor(compression)
    assert engine is not None
    (tmp_path / "a.tar").write_bytes(engine.compress(archive(item(1) + item(2))) + engine.flush())
    assert index_archives(tmp_path)[1] == []
    assert classes(tmp_path) == [1, 2]


def test_a_plain_and_a_compressed_archive_of_similar_names_are_distinguished(tmp_path: Path) -> None:
    put(tmp_path, "a.tar", item(0) + item(1))
    put(tmp_path, "a.tar.gz", item(2) + item(3))
    assert index_archives(tmp_path)[1] == []
    assert classes(tmp_path) == [0, 1, 2, 3]
    (tmp_path / "a.tar.gz").write_bytes(b"damaged")
    source = TarSource(tmp_path)
    with pytest.raises(DamageError) as caught:
        source.take(np.array([1, 3]))
    assert (caught.value.shard, caught.value.item) == ("a.tar.gz", 3)


def test_an_archive_with_many_items_has_an_exact_length(tmp_path: Path) -> None:
    put(tmp_path, "a.tar", [member for number in range(300) for member in item(number)])
    put(tmp_path, "b.tar", [member for number in range(300, 311) for member in item(number)])
    assert index_archives(tmp_path)[1] == []
    assert classes(tmp_path) == list(range(311))


# -- names of archives -------------------------------------------------------------------------------------------------


def test_a_brace_pattern_indexes_some_archives_beside_others(tmp_path: Path) -> None:
    for number in range(4):
        put(tmp_path, f"train-{number:06d}.tar", item(number))
    put(tmp_path, "val-000000.tar", item(9))
    for pattern, found in (
        ("train-{000001..000003}.tar", [1, 2, 3]),
        ("val-{000000..000000}.tar", [9]),
        ("train-*.tar", [0, 1, 2, 3]),
    ):
        where = tmp_path / pattern
        assert index_archives(str(where))[1] == []
        assert classes(where) == found
    assert classes(tmp_path / "train-{000001..000003}.tar") == [1, 2, 3]
    assert verify_shards(tmp_path / "train-{000001..000003}.tar")[1] == []


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a-{0..2}.tar", ["a-0.tar", "a-1.tar", "a-2.tar"]),
        ("a-{08..11}.tar", ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]),
        ("{a,b}-{1..2}.tar", ["a-1.tar", "a-2.tar", "b-1.tar", "b-2.tar"]),
        ("a?.tar", ["a1.tar", "a2.tar"]),
        ("a1.tar", ["a1.tar"]),
    ],
)
def test_patterns_name_archives_in_order(pattern: str, names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert [path.name for path in expand_archives(tmp_path / pattern)] == names


def test_a_folder_names_its_archives_in_order(tmp_path: Path) -> None:
    for name in (
        "b.tar",
        "a.tar.gz",
        "c.tgz",
        "d.tar.bz2",
        "e.tar.xz",
        ".hidden.tar",
        "f.tar.index",
        "notes.txt",
        "g.tar.part",
    ):
        (tmp_path / name).touch()
    assert [path.name for path in expand_archives(tmp_path)] == ["a.tar.gz", "b.tar", "c.tgz", "d.tar.bz2", "e.tar.xz"]


@pytest.mark.parametrize(
    ("pattern", "match"),
    [
        ("", "No shards found"),
        ("a-{0..2}.tar", "but 3 of 3 are missing"),
        ("none.tar", "but 1 of 1 are missing"),
        ("*.tar", "No shards found"),
        ("a-{a..c}.tar", "brace range must be"),
        ("a-{5..2}.tar", "No shards found"),
        ("a-{0..99999999999}.tar", "at most 250,000 archives"),
        ("{0..9999}{0..9999}.tar", "at most 250,000 archives"),
        ("{a}" * 17, "at most 16 braces, got 17"),
        (f"{{{'9' * 200}..1}}", "brace range must be"),
        ("a**", "must be a folder, an archive or a pattern of archives: Invalid pattern"),
        ("**", "must be a folder, an archive or a pattern of archives: Invalid pattern"),
        ("*" * 300, "must be a folder, an archive or a pattern of archives: File name too long"),
    ],
)
def test_a_pattern_that_names_nothing_is_refused(pattern: str, match: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=match):
        index_archives(tmp_path / pattern if pattern else tmp_path)


# -- what is reported --------------------------------------------------------------------------------------------------


def test_interleaved_members_are_reported_with_their_item(tmp_path: Path) -> None:
    put(tmp_path, "a.tar", [("p.cls", b"1"), ("q.cls", b"2"), ("p.json", b"{}"), ("q.json", b"{}")])
    found = problems_of(tmp_path)
    assert any(
        (shard, number) == ("a.tar", 1) and "interleaved" in reason and "p.json" in reason
        for shard, number, reason in found
    )
    assert any("q.json" in reason or "interleaved" in reason for *_, reason in found)


def test_a_repeated_member_is_reported(tmp_path: Path) -> None:
    put(tmp_path, "a.tar", [*item(0), ("p.cls", b"1"), ("p.json", b"{}"), ("p.cls", b"2")])
    assert problems_of(tmp_path) == [("a.tar", 1, "'p.cls' appears twice")]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_missing_member_is_reported_and_can_be_allowed(at: int, tmp_path: Path) -> None:
    members = [member for number in range(3) for member in item(number) if member[0] != f"item{at}.json"]
    put(tmp_path, "a.tar", members)
    assert problems_of(tmp_path) == [("a.tar", None, "1 of 3 items has no .json")]
    manifest, problems = index_archives(tmp_path, allow_missing=True)
    assert problems == []
    assert manifest is not None
    found = TarSource(tmp_path).take(np.arange(3))["json"].tolist()
    assert found == [None if n == at else {"n": n} for n in range(3)]
    assert verify_shards(tmp_path)[1] == []


def test_an_archive_that_lacks_a_member_of_others_is_reported_and_can_be_allowed(tmp_path: Path) -> None:
    put(tmp_path, "a.tar", item(0) + item(1))
    put(tmp_path, "b.tar", item(2)[:1] + item(3)[:1])
    found = problems_of(tmp_path)
    assert any(shard == "b.tar" and ".json" in reason for shard, _, reason in found)
    assert index_archives(tmp_path, allow_missing=True)[1] == []
    assert TarSource(tmp_path).take(np.arange(4))["json"].tolist() == [{"n": 0}, {"n": 1}, None, None]


def test_keys_may_begin_again_in_each_archive(tmp_path: Path) -> None:
    put(tmp_path, "a.tar", [("0.cls", b"10"), ("1.cls", b"11")])
    put(tmp_path, "b.tar", [("0.cls", b"20"), ("1.cls", b"21")])
    assert index_archives(tmp_path)[1] == []
    source = TarSource(tmp_path, fields=["cls", "__key__"])
    found = source.take(np.array([3, 0, 2]))
    assert (found["cls"].tolist(), found["__key__"].tolist()) == ([21, 10, 20], ["1", "0", "0"])
    source.close()


def test_extensions_in_any_case_are_one_field(tmp_path: Path) -> None:
    put(tmp_path, "a.tar", [("0.CLS", b"0"), ("0.LFP.NPY", npy(0)), ("1.cls", b"1"), ("1.LFP.npy", npy(1))])
    put(tmp_path, "b.tar", [("2.Cls", b"2"), ("2.LFP.Npy", npy(2))])
    manifest, problems = index_archives(tmp_path)
    assert problems == []
    assert list(manifest.fields) == ["cls", "LFP"]
    found = TarSource(tmp_path).take(np.arange(3))
    assert (found["cls"].tolist(), found["LFP"].tolist()) == ([0, 1, 2], [0, 1, 2])
    put(tmp_path, "b.tar", [("2.CLS", b"2"), ("2.LFP.npy", npy(2)), ("2.cls", b"3")])
    assert problems_of(tmp_path) == [("b.tar", 0, "'2.cls' appears twice")]


def test_a_member_without_key_or_extension_is_reported(tmp_path: Path) -> None:
    put(tmp_path, "a.tar", [*item(0), ("README", b"text")])
    ((shard, _, reason),) = problems_of(tmp_path)
    assert shard == "a.tar"
    assert "the name 'README' must have a key and an extension" in reason


@pytest.mark.parametrize("content", [archive([]), archive([(".hidden", b"x")])], ids=["empty", "hidden"])
def test_an_archive_without_items_is_reported(content: bytes, tmp_path: Path) -> None:
    put(tmp_path, "a.tar", item(0))
    (tmp_path / "b.tar").write_bytes(content)
    ((shard, _, reason),) = problems_of(tmp_path)
    assert (shard, "no items" in reason) == ("b.tar", True)


def damaged_archives() -> dict[str, bytes]:
    whole = archive([member for number in range(3) for member in item(number)])
    flipped = bytearray(whole)
    flipped[1024 + 20] ^= 1
    link = tarfile.TarInfo("c.cls")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return {
        "truncated in a header": whole[:1500],
        "truncated in a payload": whole[: 512 + 100],
        "truncated at a member": whole[: 4 * 512],
        "without its end": whole[: 12 * 512],
        "with a flipped bit": bytes(flipped),
        "with a link": link.tobuf() + whole,
        "with an absolute name": archive([("/a.cls", b"1")]),
        "with a name above": archive([("../a.cls", b"1")]),
        "of garbage": os.urandom(2000),
        "of nothing": b"",
        "cut gzip": gzip.compress(whole)[:-20],
    }


@pytest.mark.parametrize("kind", damaged_archives())
@pytest.mark.parametrize("allow_missing", [False, True])
def test_a_damaged_archive_is_reported_whatever_is_allowed(kind: str, allow_missing: bool, tmp_path: Path) -> None:
    put(tmp_path, "a.tar", item(7))
    (tmp_path / "b.tar").write_bytes(damaged_archives()[kind])
    assert {shard for shard, *_ in problems_of(tmp_path, allow_missing=allow_missing)} == {"b.tar"}


def test_object_arrays_and_inconsistent_arrays_are_reported_with_their_item(tmp_path: Path) -> None:
    folder = tmp_path / "arrays"
    folder.mkdir()
    np.save(folder / "good.npy", np.arange(3))
    np.save(folder / "bad.npy", np.array([None]), allow_pickle=True)
    good, bad = (folder / "good.npy").read_bytes(), (folder / "bad.npy").read_bytes()
    put(tmp_path / "set", "a.tar", [("p.x.npy", good), ("q.x.npy", bad), ("r.x.npy", good[:-3]), ("s.x.npy", b"")])
    found = problems_of(tmp_path / "set")
    assert [(shard, number) for shard, number, _ in found] == [("a.tar", 1), ("a.tar", 2), ("a.tar", 3)]
    assert "Python objects" in found[0][2]


def test_archives_in_two_folders_are_not_one_dataset(tmp_path: Path) -> None:
    for name in ("a", "b"):
        put(tmp_path / name, "x.tar", item(0))
    with pytest.raises(SourceError, match=r"."):
        index_archives(f"{tmp_path}/{{a,b}}/x.tar")


def test_a_problem_reads_as_a_sentence() -> None:
    assert str(Problem("a.tar", 7, "wrong")) == "a.tar, item 7: wrong"
    assert str(Problem("a.tar", None, "wrong")) == "a.tar: wrong"


# -- other programs' files ---------------------------------------------------------------------------------------------


def test_another_programs_manifest_is_kept_aside(tmp_path: Path) -> None:
    put(tmp_path, "a.tar", item(0))
    (tmp_path / MANIFEST).write_text('{"their": "manifest"}')
    index_archives(tmp_path)
    assert json.loads((tmp_path / "dataset_metadata.before_index.json").read_text()) == {"their": "manifest"}
    put(tmp_path, "b.tar", item(1))
    assert index_archives(tmp_path)[1] == []
    assert json.loads((tmp_path / "dataset_metadata.before_index.json").read_text()) == {"their": "manifest"}
    assert classes(tmp_path) == [0, 1]


def test_a_manifest_kept_aside_earlier_is_not_overwritten(tmp_path: Path) -> None:
    put(tmp_path, "a.tar", item(0))
    for version in ("first", "second"):
        (tmp_path / MANIFEST).write_text(json.dumps({"their": version}))
        index_archives(tmp_path)
    kept = [json.loads(path.read_text()).get("their") for path in tmp_path.glob("*.json")]
    assert {"first", "second"} <= set(kept)


def test_an_archive_that_changed_is_noticed_and_can_be_indexed_again(tmp_path: Path) -> None:
    put(tmp_path, "a.tar", item(0))
    index_archives(tmp_path)
    put(tmp_path, "a.tar", item(5))
    with pytest.raises(DamageError, match=r"a\.tar"):
        classes(tmp_path)
    index_archives(tmp_path)
    assert classes(tmp_path) == [5]


def test_archives_are_read_one_at_a_time_and_nothing_may_be_missing_unless_asked_for() -> None:
    defaults = inspect.signature(index_archives).parameters
    assert (defaults["workers"].default, defaults["allow_missing"].default) == (1, False)


def test_progress_adds_up_to_all_bytes(tmp_path: Path) -> None:
    paths = [put(tmp_path, f"{number}.tar", item(number)) for number in range(3)]
    done_bytes: list[int] = []
    index_archives(tmp_path, progress=done_bytes.append, workers=2)
    assert sum(done_bytes) == sum(path.stat().st_size for path in paths)
