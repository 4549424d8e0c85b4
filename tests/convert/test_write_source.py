"""Writing a chosen source gives its items, bit for bit, whatever else happens."""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from penstock_convert_parts import tree

import penstock as ps
from penstock import ArraySource, Concat, OptionError, PenstockError, SourceError, TarSource, WriteError
from penstock.convert import write_source
from penstock.convert.add_field import AddField
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.verify import verify_shards
from penstock.shard.writer import ShardWriter
from penstock.source.combine import Renamed


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


def choose(datasets: Any, edits: dict[str, Any]) -> Any:
    """Return the source, or the parts, that the edits choose."""
    given = [TarSource(folder) for folder in (datasets if isinstance(datasets, list) else [datasets])]
    source: Any = given[0] if len(given) == 1 else Concat(given)
    source = source.where(edits["where"]) if "where" in edits else source
    parts = {"": source}
    if "split" in edits:
        parts = source.split(by=edits.get("split_by"), seed=edits.get("seed", 0), **edits["split"])
    if "sort_by" in edits:
        parts = {name: part.sort_by(edits["sort_by"]) for name, part in parts.items()}
    if "rename" in edits:
        parts = {name: Renamed(part, edits["rename"]) for name, part in parts.items()}
    return parts if "split" in edits else parts[""]


def edit(source: Any, output: Path, **edits: Any) -> Any:
    how = {name: edits[name] for name in ("workers", "resume", "overwrite", "transform", "shard_size") if name in edits}
    return write_source(choose(source, edits), output, **how, show_progress=False)


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
    edit(datasets, tmp_path / "once", where="rank > 2", sort_by="rank")
    found = TarSource(tmp_path / "once").manifest.metadata
    assert found["lab"] == "north"
    said = found["conversion"]["source"]["items"]
    assert "where('rank > 2'), sort_by('rank')" in said.replace("where(rank > 2)", "where('rank > 2')").replace(
        ")), ", "), "
    )
    assert str(tmp_path) not in said
    origins = [TarSource(folder).manifest.fingerprint for folder in datasets]
    assert [entry["about"]["fingerprint"] for entry in found["conversion"]["inputs"]] == origins
    write_source(TarSource(tmp_path / "once"), tmp_path / "twice", shard_bytes=20_000, show_progress=False)
    again = TarSource(tmp_path / "twice").manifest
    assert again.metadata["conversion"]["inputs"][0]["about"]["conversion"] == found["conversion"]
    assert numbers_of(tmp_path / "twice") == numbers_of(tmp_path / "once")
    assert all(10_000 < shard.tar_bytes <= 20_480 for shard in again.shards[:-1])


BAD: dict[str, tuple[dict[str, Any], type[PenstockError], str]] = {
    "no column": ({"where": "subjet == 'a'"}, SourceError, "Did you mean 'subject'?"),
    "no column to sort by": ({"sort_by": "rang"}, SourceError, "Did you mean 'rank'?"),
    "nothing is left": ({"where": "rank > 70"}, SourceError, "There must be items to write"),
    "no field to rename": ({"rename": {"w": "v"}}, OptionError, "got ['w']"),
    "one name for two": ({"rename": {"x": "y"}}, OptionError, "two would be 'y'"),
    "files without extension": ({"rename": {"left.ppm": "left"}}, OptionError, "such as left.ppm"),
    "an array to sort by": ({"sort_by": "x"}, SourceError, "one value per item"),
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
            edit(datasets[0], out, overwrite=True)
    with pytest.raises(OptionError, match="outside of the dataset that is read"):
        edit(datasets[0], datasets[0].parent, split={"first": 0.5, "other": 0.5})
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
    with pytest.raises(SourceError, match=r"'time', but item 3 of .*gaps.* has none"):
        edit(tmp_path / "gaps", tmp_path / "out", sort_by="time")
    edit(tmp_path / "gaps", tmp_path / "out", sort_by="time", where="time != None")
    assert numbers_of(tmp_path / "out") == [4, 2, 1, 0]


def total(item: dict[str, Any]) -> Any:
    return {**item, "total": item["x"].sum() + item["metadata"]["rank"]}


def fail_at_seven(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "f": 1 / (item["y"].item() - 7)}


def leave(_item: dict[str, Any]) -> dict[str, Any]:
    raise SystemExit(3)


def none(_item: dict[str, Any]) -> Any:
    return None


@pytest.mark.parametrize("workers", [1, 2])
def test_items_are_changed_by_what_map_was_given(workers: int, datasets: list[Path], tmp_path: Path) -> None:
    data = ps.open([*map(str, datasets)]).fields("x", "y", "metadata").where("rank > 2").map(total)
    data.write(tmp_path / "out", workers=workers, show_progress=False)
    kept = [n for n in range(23) if n * 5 % 7 > 2]
    items = TarSource(tmp_path / "out").take(np.arange(len(kept)))
    assert items["total"].tolist() == [30 * n + 3 + n * 5 % 7 for n in kept]
    assert [(about["sample_id"], about["rank"]) for about in items["metadata"]] == [
        (f"id-{n}", n * 5 % 7) for n in kept
    ]


def test_a_random_transform_depends_on_the_seed_and_the_item_alone(datasets: list[Path], tmp_path: Path) -> None:
    def add_noise(item: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"x": item["x"] + rng.normal(size=3), "metadata": {"noisy": True}}

    source = TarSource(datasets[0], fields=["x", "metadata"])
    for name, seed, shard_size in (("a", 1, 4), ("b", 1, 5), ("c", 2, 4)):
        options: dict[str, Any] = {"shard_size": shard_size, "show_progress": False}
        write_source(source, tmp_path / name, transform=add_noise, seed=seed, **options)
    first, again, other = (TarSource(tmp_path / name).take(np.arange(14)) for name in "abc")
    assert np.array_equal(first["x"], again["x"])
    assert not np.array_equal(first["x"], other["x"])
    assert [(about["sample_id"], about["noisy"]) for about in first["metadata"]] == [
        (f"id-{n}", True) for n in range(14)
    ]
    assert "rank" not in first["metadata"][0]


def test_any_source_is_written(tmp_path: Path) -> None:
    arrays = ArraySource({"x": np.arange(10), "y": np.ones((10, 2))})
    found = ps.open(arrays).where("x >= 4").sort_by("x").write(tmp_path / "out", shard_size=4, show_progress=False)
    assert (found["total_samples"], found["total_shards"]) == (6, 2)
    assert numbers_of(tmp_path / "out", "x") == [4, 5, 6, 7, 8, 9]
    items = [{"x": np.full(2, n), "metadata": {"subject": "abc"[n]}} for n in range(3)]
    write_source(ps.DatasetSource(items), tmp_path / "items", show_progress=False)
    assert TarSource(tmp_path / "items").metadata("subject").tolist() == ["a", "b", "c"]
    with pytest.raises(PenstockError, match="must return a dict of fields, got 7 for item 0"):
        write_source(ps.DatasetSource([7]), tmp_path / "numbers", show_progress=False)
    with pytest.raises(ps.PlanError, match="must not follow shuffle"):
        ps.open(arrays).shuffle(1).write(tmp_path / "out")
    with pytest.raises(OptionError, match="got worker"):
        ps.open(arrays).write(tmp_path / "out", worker=2)


def test_values_that_change_before_a_write_is_resumed_are_not_mixed(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "a.zarr", data=np.arange(64).reshape(32, 2), chunks=(1, 2))

    def fail_late(item: dict[str, Any]) -> dict[str, Any]:
        if item["data"][0] == 60:
            raise KeyboardInterrupt
        return item

    data = ps.open(tmp_path / "a.zarr").map(fail_late)
    with pytest.raises(KeyboardInterrupt):
        data.write(tmp_path / "out", shard_size=4, show_progress=False)
    array[5] = 7
    with pytest.raises(OptionError, match=r"needs the same inputs and options|had another size or time"):
        data.write(tmp_path / "out", shard_size=4, resume=True, show_progress=False)


BAD_FUNCTIONS: dict[str, tuple[Any, str]] = {
    "fails": (fail_at_seven, "fail_at_seven failed at item 7 ('id-7'): ZeroDivisionError"),
    "exits": (leave, "leave failed at item 0 ('id-0'): SystemExit: 3"),
    "none": (none, "none must return a dict of fields, got None for item 0"),
    "lambda": (lambda item: item, "must be picklable"),
}


@pytest.mark.parametrize("case", BAD_FUNCTIONS)
def test_a_function_that_fails_is_named_with_the_item(case: str, datasets: list[Path], tmp_path: Path) -> None:
    function, message = BAD_FUNCTIONS[case]
    with pytest.raises(PenstockError) as raised:
        ps.open(datasets[0]).map(function).write(tmp_path / "out", workers=2 if case == "lambda" else 1)
    assert message in str(raised.value)
    assert not (tmp_path / "out" / "dataset_metadata.json").exists()


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("math:loudness", "'math:loudness' could not be imported"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("math", "module:function"),
    ],
)
def test_a_function_is_found_by_its_name(named: str, message: str) -> None:
    with pytest.raises(OptionError) as raised:
        AddField("f", named)
    assert message in str(raised.value)


def test_a_field_to_add_has_a_name_of_its_own() -> None:
    with pytest.raises(SourceError, match="the items have 'x' already"):
        AddField("x", "builtins:len")({"x": 1}, np.random.default_rng())


def test_a_function_that_was_changed_is_not_resumed(
    datasets: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for body in ("1 / (item['y'].item() - 7)", "item['y'].item() + 0.5"):
        (tmp_path / "features_of_test.py").write_text(f"def f(item):\n    return {body}\n")
        monkeypatch.delitem(sys.modules, "features_of_test", raising=False)
        importlib.invalidate_caches()
        transform = AddField("f", "features_of_test:f")
        if "7" in body:
            for _ in range(2):  # the second one resumes, and fails again
                with pytest.raises(PenstockError, match="ZeroDivisionError"):
                    edit(datasets[0], tmp_path / "out", resume=True, transform=transform)
            continue
        with pytest.raises(PenstockError, match=r"other (inputs or )?options|started with"):
            edit(datasets[0], tmp_path / "out", resume=True, transform=transform)
        edit(datasets[0], tmp_path / "out", overwrite=True, transform=transform)
    found = TarSource(tmp_path / "out").take(np.arange(14))["f"]
    assert found.tolist() == [TarSource(datasets[0]).take(np.array([n]))["y"].item() + 0.5 for n in range(14)]
