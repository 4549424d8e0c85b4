"""Metadata of batches: dicts that are made when they are looked at, through every executor and combined source."""

import gc
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import to_plain
from torch.utils.data import default_collate

import penstock as ps
from penstock.core import Records
from penstock.core.metadata import table
from penstock.recipes.webdataset import WebDatasetWriter
from penstock.shard.index_tars import index_archives
from penstock.source import Numbered, Take

N_ITEMS = 60


def about(item: int) -> dict[str, Any]:
    return {"trial": item, "subject": f"m{item % 3}", "tags": ["x"] * (item % 4)}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("metadata") / "shards"
    metadata = [about(item) for item in range(N_ITEMS)]
    ps.create_shards_from_arrays(folder, {"x": np.arange(N_ITEMS)}, shard_size=25, metadata=metadata)
    return folder


def own(metadata: Any) -> list[dict[str, Any]]:
    """Return what the user stored."""
    return [{name: one[name] for name in ("trial", "subject", "tags")} for one in metadata]


def combined(kind: str, shards: Path) -> ps.Source:
    source = ps.TarSource(shards)
    if kind == "take":
        return Take(source, np.arange(N_ITEMS)[::-1])
    if kind == "concat":
        return ps.Concat([source, ps.TarSource(shards)])
    if kind == "zip":
        return ps.Zip([ps.TarSource(shards, fields=["x"]), ps.TarSource(shards, fields=["metadata"])])
    if kind == "numbered":
        return Numbered(source)
    return source


@pytest.mark.parametrize("kind", ["shards", "take", "concat", "zip", "numbered"])
@pytest.mark.parametrize("order", [ps.Shuffle(), ps.WindowShuffle(2), ps.Sequential()])
def test_every_item_has_its_metadata(kind: str, order: ps.Order, shards: Path):
    source = combined(kind, shards)
    plan = ps.Plan(source.index, order, batch_size=7, seed=3)
    with ps.Loader(source, plan) as loader:
        for batch in loader:
            assert type(batch["metadata"]) is Records
            assert own(batch["metadata"]) == [about(item) for item in batch["x"].tolist()]


@pytest.mark.parametrize("executor", ["threads", "processes"])
@pytest.mark.parametrize("order", [ps.Shuffle(), ps.WindowShuffle(2)])
def test_workers_deliver_the_same_metadata(executor: Any, order: ps.Order, shards: Path):
    source = ps.TarSource(shards)
    plan = ps.Plan(source.index, order, batch_size=7, seed=3)
    options = ps.RunOptions(executor=executor)
    with ps.Loader(source, plan) as alone, ps.Loader(source, plan, num_workers=2, options=options) as loader:
        expected = [(batch["x"].tolist(), list(batch["metadata"])) for batch in alone]
        assert [(batch["x"].tolist(), batch["metadata"]) for batch in loader] == expected


def test_a_mixture_delivers_metadata(shards: Path):
    mixture = ps.Mixture({"a": ps.TarSource(shards), "b": ps.TarSource(shards)})
    plan = ps.Plan(mixture.index, mixture.order, batch_size=9, seed=1)
    with ps.Loader(mixture, plan) as loader:
        for batch in loader:
            assert own(batch["metadata"]) == [about(item) for item in batch["x"].tolist()]


def test_json_that_nobody_looks_at_is_not_parsed(shards: Path, monkeypatch: pytest.MonkeyPatch):
    parsed: list[int] = []
    parse = table.RecordTable._parse
    monkeypatch.setattr(table.RecordTable, "_parse", lambda self, row: (parsed.append(row), parse(self, row))[1])
    source = ps.Concat([ps.TarSource(shards), ps.TarSource(shards)])
    for order in (ps.Shuffle(), ps.WindowShuffle(2)):
        with ps.Loader(source, ps.Plan(source.index, order, batch_size=7, seed=3)) as loader:
            batches = list(loader)
        assert not parsed
        assert batches[3]["metadata"][2]["trial"] == batches[3]["x"][2]
        assert len(parsed) == 1
        parsed.clear()


def test_a_transform_gets_a_dict_and_may_change_it(shards: Path):
    def shift(item: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        item["metadata"]["trial"] += 100
        assert type(item["metadata"]) is dict
        return item

    source = ps.TarSource(shards)
    plan = ps.Plan(source.index, ps.WindowShuffle(2), batch_size=7, seed=3)
    collate = lambda items: ([int(item["x"]) for item in items], [item["metadata"]["trial"] for item in items])  # noqa: E731
    with ps.Loader(source, plan, transform=shift, collate=collate) as loader:
        for _ in range(2):
            for numbers, trials in loader:
                assert trials == [number + 100 for number in numbers]


def same(item: dict[str, Any], rng: np.random.Generator | None = None) -> dict[str, Any]:
    return item


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of fields that torch has nothing like, some of them None in some items."""
    folder = tmp_path_factory.mktemp("mixed") / "shards"
    with WebDatasetWriter(folder, shard_size=5) as writer:
        for item in range(9):
            writer.write_sample(
                {
                    "x": np.int64(item),
                    "events": np.arange(item + 1.0),
                    "note": f"item {item}",
                    "units": np.array(["a", f"b{item}"]),
                    "pair": [item, item + 1],
                    "about": {"item": item, "none": None},
                },
                metadata={"age": None if item % 2 else item},
            )
    return folder


@pytest.mark.parametrize("executor", ["inline", "threads", "processes"])
def test_a_transform_leaves_other_fields_as_they_are(executor: Any, mixed: Path):
    options = {"options": ps.RunOptions(executor=executor), "num_workers": 0 if executor == "inline" else 2}
    data = ps.open(mixed).shuffle(seed=3)
    with data.batch(2).loader() as loader:
        expected = [{name: to_plain(value) for name, value in batch.items()} for batch in loader]
    chain = data.map(same).batch(2)
    for loader in (chain.loader(**options), ps.Loader(chain.source, chain.plan, transform=same, **options)):
        with loader:
            for batch, before in zip(loader, expected, strict=True):
                assert list(batch) == list(before)
                assert type(batch["metadata"]) is Records
                assert {name: to_plain(value) for name, value in batch.items()} == before


def test_fields_of_no_numbers_are_lists_with_and_without_a_transform():
    days = np.arange(6).astype("M8[D]")
    arrays = {
        "day": days,
        "days": np.stack([days, days], axis=1),
        "took": days - days[0],
        "name": np.array([f"n{i}" for i in range(6)]),
        "code": np.array([b"%d" % i for i in range(6)]),
        "pair": np.array([(i, i / 2) for i in range(6)], [("i", "i4"), ("f", "f8")]),
    }
    data = ps.open(arrays)
    with data.batch(2).loader() as plain, data.map(same).batch(2).loader() as mapped:
        first, *others = list(mapped)  # memory that is used again must not be in a batch
        for batch, expected in zip([first, *others], plain, strict=True):
            assert {name: np.array(batch[name]).tolist() for name in batch} == {
                name: np.array(expected[name]).tolist() for name in expected
            }
            assert all(type(batch[name]) is list and type(batch[name][0]) is type(expected[name][0]) for name in batch)


def test_what_a_transform_makes_of_metadata_and_text_is_delivered(mixed: Path):
    def number(item: dict[str, Any]) -> dict[str, Any]:
        return {**item, "metadata": {"n": int(item["x"])}, "note": len(item["note"]), "events": item["events"][:1]}

    with ps.open(mixed).map(number).batch(3).loader() as loader:
        batch = next(iter(loader))
    assert batch["metadata"] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert (batch["note"].tolist(), batch["events"].tolist()) == ([6, 6, 6], [[0.0], [0.0], [0.0]])
    with ps.open(mixed).map(lambda item: {**item, "metadata": item["x"]}).batch(3).loader() as loader:
        assert next(iter(loader))["metadata"].tolist() == [0, 1, 2]


def test_padding_a_field_leaves_metadata_a_list(mixed: Path):
    with ps.open(mixed).fields("events", "metadata").budget(20, by="events").loader() as loader:
        for batch in loader:
            ages = [None if length % 2 == 0 else length - 1 for length in batch["lengths"].tolist()]
            assert [about["age"] for about in batch["metadata"]] == ages


def test_a_column_is_read_alone_and_kept(shards: Path, monkeypatch: pytest.MonkeyPatch):
    source = ps.TarSource(shards, fields=["x"])
    subject, trial = source.metadata("subject"), source.metadata("trial")
    assert subject.tolist() == [f"m{item % 3}" for item in range(N_ITEMS)]
    assert (trial.dtype, trial.tolist()) == (np.int64, list(range(N_ITEMS)))
    monkeypatch.setattr(ps.TarSource, "take", None)
    assert source.metadata("trial") is trial
    with pytest.raises(ValueError, match="read-only"):
        trial[0] = 1
    chosen = source.index.select((subject == "m1") & (trial > 30))
    assert chosen.stored(np.arange(len(chosen))).tolist() == [n for n in range(31, N_ITEMS) if n % 3 == 1]


def test_kept_metadata_keep_no_more_than_themselves(shards: Path):
    source = ps.TarSource(shards)
    for order in (ps.Shuffle(), ps.WindowShuffle(2)):
        with ps.Loader(source, ps.Plan(source.index, order, batch_size=10, seed=3)) as loader:
            kept = [batch["metadata"][0] for batch in loader]
            gc.collect()
            del loader
        assert len(kept) == 6
        gc.collect()
        assert not [one for one in gc.get_objects() if type(one) is table.RecordTable]


def write_tar(path: Path, payloads: list[bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for number, payload in enumerate(payloads):
            for suffix, content in (("txt", b"%d" % number), ("metadata.json", payload)):
                member = tarfile.TarInfo(f"item{number}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def test_json_that_was_never_valid_is_named_when_it_is_looked_at(tmp_path: Path):
    write_tar(tmp_path / "a.tar", [json.dumps({"n": n}).encode() if n != 2 else b"{" for n in range(4)])
    index_archives(tmp_path)
    source = ps.TarSource(tmp_path)
    found = source.take(np.arange(4))["metadata"]
    assert found[1] == {"n": 1}
    with pytest.raises(ps.DamageError, match=r"item 2 in a\.tar: 'metadata\.json'"):
        found[2]
    with pytest.raises(ps.DamageError, match=r"item 2 in a\.tar"):
        source.metadata("n")


def test_json_that_was_never_valid_is_substituted(tmp_path: Path):
    write_tar(tmp_path / "a.tar", [json.dumps({"n": n}).encode() if n != 2 else b"{" for n in range(4)])
    index_archives(tmp_path)
    source = ps.TarSource(tmp_path, on_error="substitute")
    found = source.take(np.arange(4))
    assert [one["n"] for one in found["metadata"]] == [int(text) for text in found["txt"]]
    assert [one["n"] for one in found["metadata"]][:2] == [0, 1]


# -- what people do with a batch ---------------------------------------------------------------------------------------


@pytest.fixture
def batch(shards: Path) -> Any:
    source = ps.TarSource(shards)
    with ps.Loader(source, ps.Plan(source.index, ps.Shuffle(), batch_size=7, seed=3)) as loader:
        return next(iter(loader))


def test_trainers_that_move_a_batch_leave_its_metadata_as_they_are(batch: Any, monkeypatch: pytest.MonkeyPatch):
    accelerate, lightning = pytest.importorskip("accelerate.utils"), pytest.importorskip("lightning.fabric.utilities")
    monkeypatch.setattr(table.RecordTable, "at", lambda *_: pytest.fail("a dict was made"))
    monkeypatch.setattr(table.RecordTable, "rows_at", lambda *_: pytest.fail("dicts were made"))
    for move in (accelerate.send_to_device, lightning.move_data_to_device):
        assert move(batch, torch.device("cpu"))["metadata"] is batch["metadata"]


def test_frames_of_pandas_and_polars_have_a_column_for_each_name(batch: Any):
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    for frame in (pandas.DataFrame(batch["metadata"]), polars.DataFrame(batch["metadata"])):
        assert frame["trial"].to_list() == batch["x"].tolist()
        assert {"trial", "subject", "tags", "sample_id"} <= set(frame.columns)


def test_torch_collates_metadata_by_name_and_batches_of_them():
    records = Records([{"trial": item, "subject": f"m{item}"} for item in range(3)])
    assert default_collate(records)["trial"].tolist() == [0, 1, 2]
    both = default_collate([{"metadata": records}, {"metadata": records}])["metadata"]
    assert [one["trial"].tolist() for one in both] == [[0, 0], [1, 1], [2, 2]]


def test_json_takes_metadata_as_a_list(batch: Any):
    assert json.loads(json.dumps(list(batch["metadata"]))) == batch["metadata"]
    assert json.loads(json.dumps(batch["metadata"], default=list)) == batch["metadata"]
