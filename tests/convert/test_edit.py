"""Editing a dataset gives the items that the edits name, bit for bit, whatever else happens."""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_convert_parts import tree

from penstock import Concat, OptionError, PenstockError, SourceError, TarSource, WriteError, Zip
from penstock.convert import Edits, edit_dataset
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.verify import verify_shards
from penstock.shard.writer import ShardWriter


def subject_of(number: int) -> str:
    return "abc"[number * 7 % 3]


def picture(number: int) -> bytes:
    return b"P6 1 1 255\n" + bytes([number, 1, 2])


def write(folder: Path, numbers: range, shard_size: int = 4) -> Path:
    writer = ShardWriter(folder, WriteOptions(shard_size, metadata={"lab": "north", "conversion": {"from": "tapes"}}))
    for number in numbers:
        sample = {
            "x": np.arange(3) + 10 * number,
            "y": np.float32(number),
            "note": f"n{number}",
            "left.ppm": picture(number),
        }
        about = {"subject": subject_of(number), "rank": number * 5 % 7}
        writer.write(sample, f"id-{number}", about)
    writer.commit()
    return folder


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("edit")
    return [write(folder / "first", range(14)), write(folder / "second", range(14, 23), 3)]


def edit(source: Any, output: Path, *, workers: int = 1, resume: bool = False, **edits: Any) -> Any:
    return edit_dataset(source, output, Edits(**edits), workers=workers, resume=resume, show_progress=False)


def read(folder: Path) -> dict[str, list[Any]]:
    assert verify_shards(folder)[1] == []
    names = list(TarSource(folder).fields)
    files = [name for name in names if name == "left.ppm"]
    others = [name for name in names if name not in files]
    sources = [TarSource(folder, fields=others), *(TarSource(folder, fields=[name], decode=False) for name in files)]
    return {name: [*v] for source in sources for name, v in source.take(np.arange(len(source.index))).items()}


def numbers_of(folder: Path, name: str = "y") -> list[int]:
    return [int(value) for value in read(folder)[name]]


HALVES = {"train": 0.7, "val": 0.3}
CASES: dict[str, dict[str, Any]] = {
    "some": {"where": "rank >= 3 or subject == 'b'"},
    "sorted": {"sort_by": "rank", "shard_size": 5},
    "some in two parts": {"where": "rank >= 2", "split": HALVES, "seed": 3, "shard_size": 1},
    "parts by subject, sorted": {"split": HALVES, "split_by": "subject", "sort_by": "rank"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n_datasets", [1, 2])
def test_edits_give_the_items_they_name_in_their_order(
    case: str, n_datasets: int, datasets: list[Path], tmp_path: Path
) -> None:
    edits = CASES[case]
    edit(datasets[:n_datasets], tmp_path / "out", **edits, rename={"x": "z"})
    both = Concat([TarSource(folder) for folder in datasets[:n_datasets]])
    kept = both.where(edits["where"]) if "where" in edits else both
    division = {"by": edits.get("split_by"), "seed": edits.get("seed", 0)}
    parts: dict[str, Any] = kept.split(**edits["split"], **division) if "split" in edits else {"": kept}
    assert sum(len(part.index) for part in parts.values()) == len(kept.index) > 5
    for name, part in parts.items():
        wanted = part.columns("y")["y"].astype(int).tolist()
        wanted = sorted(wanted, key=lambda n: n * 5 % 7) if "sort_by" in edits else wanted
        items = read(tmp_path / "out" / name)
        assert [int(value) for value in items["y"]] == wanted
        assert [value.tolist() for value in items["z"]] == [[10 * n, 10 * n + 1, 10 * n + 2] for n in wanted]
        assert [(about["sample_id"], about["rank"]) for about in items["metadata"]] == [
            (f"id-{n}", n * 5 % 7) for n in wanted
        ]
        assert items["left.ppm"] == [picture(n) for n in wanted]
        sizes = TarSource(tmp_path / "out" / name).manifest.table.n_items.tolist()
        assert sizes[:-1] == [edits.get("shard_size", 4)] * (len(sizes) - 1)


def test_the_manifest_says_what_a_dataset_was_made_of(datasets: list[Path], tmp_path: Path) -> None:
    edit(datasets, tmp_path / "once", where="rank > 2", drop_fields=["note"], sort_by="rank")
    found = TarSource(tmp_path / "once").manifest.metadata
    assert found["lab"] == "north"
    assert found["conversion"]["edits"] == {"where": "rank > 2", "drop_fields": ["note"], "sort_by": "rank"}
    origins = [TarSource(folder).manifest.fingerprint for folder in datasets]
    assert [entry["about"]["fingerprint"] for entry in found["conversion"]["inputs"]] == origins
    edit(tmp_path / "once", tmp_path / "twice", shard_bytes=20_000)
    again = TarSource(tmp_path / "twice").manifest
    assert again.metadata["conversion"]["inputs"][0]["about"]["conversion"] == found["conversion"]
    assert numbers_of(tmp_path / "twice") == numbers_of(tmp_path / "once")
    assert all(10_000 < shard.tar_bytes <= 20_480 for shard in again.shards[:-1])


BAD: dict[str, tuple[dict[str, Any], type[PenstockError], str]] = {
    "no column": ({"where": "subjet == 'a'"}, SourceError, "Did you mean 'subject'?"),
    "no column to sort by": ({"sort_by": "rang"}, SourceError, "Did you mean 'rank'?"),
    "nothing is left": ({"where": "rank > 70"}, SourceError, "keeps none of 14 items"),
    "no field to drop": ({"drop_fields": ["nota"]}, OptionError, "got 'nota'. Did you mean 'note'?"),
    "no field to rename": ({"rename": {"w": "v"}}, OptionError, "must be one of 'x', 'y', 'note', 'left.ppm', got 'w'"),
    "metadata": ({"drop_fields": ["metadata"]}, OptionError, "Metadata stay with their items"),
    "no field is left": ({"drop_fields": ["x", "y", "note", "left.ppm"]}, OptionError, "at least one field"),
    "one name for two": ({"rename": {"x": "y"}}, OptionError, "two would be 'y'"),
    "files without extension": ({"rename": {"left.ppm": "left"}}, OptionError, "such as left.ppm"),
    "an array to sort by": ({"sort_by": "x"}, SourceError, "one value per item"),
    "two sizes": ({"shard_size": 3, "shard_bytes": 3}, OptionError, "At most one of shard_size and shard_bytes"),
    "by without split": ({"split_by": "subject"}, OptionError, "split_by needs a split"),
    "fractions": ({"split": {"a": 0.5}}, OptionError, "add up to 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_done_is_refused_and_nothing_is_written(case: str, datasets: list[Path], tmp_path: Path) -> None:
    edits, error, message = BAD[case]
    with pytest.raises(error) as raised:
        edit(datasets[0], tmp_path / "out", **edits)
    assert message in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_no_dataset_is_written_over_another_or_into_itself(datasets: list[Path], tmp_path: Path) -> None:
    before = tree(datasets[0])
    link = tmp_path / "link"
    link.symlink_to(datasets[0])
    for out in (datasets[0], link, datasets[0] / "inside"):
        with pytest.raises(OptionError, match="outside of the dataset that is read"):
            edit_dataset(datasets[0], out, overwrite=True, show_progress=False)
    with pytest.raises(OptionError, match="outside of the dataset that is read"):
        edit(datasets[0], datasets[0].parent, split={"first": 0.5, "other": 0.5})
    with pytest.raises(OptionError, match="twice"):
        edit([datasets[0], link], tmp_path / "out")
    with pytest.raises(WriteError, match="holds a dataset already"):
        edit(datasets[0], datasets[1])
    with pytest.raises(SourceError, match="must have the same fields"):
        edit([datasets[0], write_other(tmp_path / "other")], tmp_path / "out")
    assert tree(datasets[0]) == before
    assert not (tmp_path / "out").exists()


def write_other(folder: Path) -> Path:
    writer = ShardWriter(folder, WriteOptions(2))
    writer.write({"z": np.arange(3)}, None, None)
    writer.commit()
    return folder


def test_items_without_a_value_are_named(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "gaps", WriteOptions(2))
    for number in range(5):
        writer.write({"y": number}, None, {"time": None if number == 3 else 5 - number})
    writer.commit()
    with pytest.raises(SourceError, match=r"'time', but item 3 of .*gaps has none"):
        edit(tmp_path / "gaps", tmp_path / "out", sort_by="time")
    edit(tmp_path / "gaps", tmp_path / "out", sort_by="time", where="time != None")
    assert numbers_of(tmp_path / "out") == [4, 2, 1, 0]


def total(item: dict[str, Any]) -> Any:
    return item["x"].sum() + item["metadata"]["rank"]


def fail_at_seven(item: dict[str, Any]) -> float:
    return 1 / (item["y"].item() - 7)


def leave(_item: dict[str, Any]) -> float:
    raise SystemExit(3)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_sidecar_has_the_added_field_of_the_same_items(workers: int, datasets: list[Path], tmp_path: Path) -> None:
    before = tree(datasets[0])
    found = edit(datasets[0], tmp_path / "side", add_fields={"total": total}, workers=workers)
    assert (found["modalities"], found["total_shards"]) == (["total"], 4)
    expected = [30 * n + 3 + n * 5 % 7 for n in range(14)]
    both = Zip([TarSource(datasets[0]), TarSource(tmp_path / "side", fields=["total"])])
    assert both.take(np.arange(14))["total"].tolist() == expected
    assert tree(datasets[0]) == before
    edit(datasets, tmp_path / "copy", add_fields={"total": total}, copy=True, where="rank > 2", drop_fields=["x"])
    items = read(tmp_path / "copy")
    assert sorted(items) == ["left.ppm", "metadata", "note", "total", "y"]
    assert [int(v) for v in items["total"]] == [30 * n + 3 + n * 5 % 7 for n in range(23) if n * 5 % 7 > 2]


BAD_FUNCTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "fails": ({"f": fail_at_seven}, "fail_at_seven failed at item 7 (key 'id-7'): ZeroDivisionError"),
    "exits": ({"f": leave}, "leave failed at item 0 (key 'id-0'): SystemExit: 3"),
    "not there": ({"f": "math:loudness"}, "'math:loudness' could not be imported"),
    "no module": ({"f": "no_such_module:f"}, "No module named 'no_such_module'"),
    "no name": ({"f": "math"}, "module:function"),
    "lambda": ({"f": lambda item: 1}, "at the top level of a module"),
    "taken": ({"x": total}, "the items have 'x' already"),
}


@pytest.mark.parametrize("case", BAD_FUNCTIONS)
def test_a_function_that_fails_is_named_with_the_item(case: str, datasets: list[Path], tmp_path: Path) -> None:
    with pytest.raises(PenstockError) as raised:
        edit(datasets[0], tmp_path / "out", add_fields=BAD_FUNCTIONS[case][0])
    assert BAD_FUNCTIONS[case][1] in str(raised.value)
    assert not (tmp_path / "out" / "dataset_metadata.json").exists()


def test_a_function_that_was_changed_is_not_resumed(
    datasets: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    job: dict[str, Any] = {"add_fields": {"f": "features_of_test:f"}}
    for body in ("1 / (item['y'].item() - 7)", "item['y'].item() + 0.5"):
        (tmp_path / "features_of_test.py").write_text(f"def f(item):\n    return {body}\n")
        monkeypatch.delitem(sys.modules, "features_of_test", raising=False)
        importlib.invalidate_caches()
        if "7" in body:
            for _ in range(2):  # the second one resumes, and fails again
                with pytest.raises(PenstockError, match="ZeroDivisionError"):
                    edit(datasets[0], tmp_path / "out", resume=True, **job)
            continue
        with pytest.raises(PenstockError, match=r"other (inputs or )?options|started with"):
            edit(datasets[0], tmp_path / "out", resume=True, **job)
        edit_dataset(datasets[0], tmp_path / "out", Edits(**job), overwrite=True, show_progress=False)
    found = TarSource(tmp_path / "out").take(np.arange(14))["f"]
    assert found.tolist() == [TarSource(datasets[0]).take(np.array([n]))["y"].item() + 0.5 for n in range(14)]


def test_a_sidecar_keeps_all_items(datasets: list[Path], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="where needs copy=True"):
        edit(datasets[0], tmp_path / "out", add_fields={"total": total}, where="rank > 2")
    with pytest.raises(OptionError, match="that of one dataset"):
        edit(datasets, tmp_path / "out", add_fields={"total": total})
