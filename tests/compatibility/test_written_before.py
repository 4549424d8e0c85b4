"""Files that the code of d511aa8 wrote are read by the code of today, to the last value.

That commit is the last one before the modules were moved to other rooms. `make_fixtures.py` says how the files were
made; nothing here may be made to pass by making them anew.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import parts_compatibility as parts
import parts_states
import pytest
from parts_compatibility import N_ARRAYS, WRITTEN, numbered, plain

import penstock as ps

# A public name that has a new place still does what it did: that is what is looked at here.
pytestmark = pytest.mark.filterwarnings("ignore:.*penstock:DeprecationWarning")


def stored(name: str) -> Any:
    """Return what a JSON file says."""
    return json.loads((WRITTEN / name).read_bytes())


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def everything(folder: Path, **options: Any) -> dict[str, Any]:
    """Return all items of a data set, by field."""
    source = ps.TarSource(folder, **options)
    return plain(source.take(np.arange(len(source.index))))


@pytest.fixture
def copied(tmp_path: Path) -> Callable[..., Path]:
    """Copies fixtures to where they may be changed, side by side as they lay."""

    def copy(*names: str) -> Path:
        for name in names:
            where = WRITTEN / name
            (shutil.copytree if where.is_dir() else shutil.copy)(where, _made(tmp_path / "fixtures" / name))
        return tmp_path / "fixtures"

    return copy


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


# -- data sets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["arrays", "gz", "bz2"])
def test_shards_of_arrays_hold_what_they_held(name: str) -> None:
    found = everything(WRITTEN / "shards" / name)
    metadata = found.pop("metadata")
    assert found == plain(parts.arrays())
    assert [entry["sample_id"] for entry in metadata] == [f"sample_{number:09d}" for number in range(N_ARRAYS)]
    if name == "arrays":
        assert [entry["trial"] for entry in metadata] == list(range(1, N_ARRAYS + 1))


@pytest.mark.parametrize(
    ("name", "n_shards", "about", "fingerprint"),
    [
        ("arrays", 3, {}, "a7ad1d736298fac5646c8863bf710a4f"),
        ("gz", 2, parts.ABOUT, "e83a0f9c2c01491e979c864bfc560028"),
    ],
)
def test_a_manifest_says_what_it_said(name: str, n_shards: int, about: Any, fingerprint: str) -> None:
    summary = ps.ShardedDatasetInfo(WRITTEN / "shards" / name).get_summary()
    assert (summary["total_samples"], summary["total_shards"], summary["problems"]) == (N_ARRAYS, n_shards, [])
    assert (summary["metadata"], summary["fingerprint"]) == (about, fingerprint)
    assert {name: (field["dtype"], field["shape"]) for name, field in summary["fields"].items()} == {
        "x": ("float32", [3]), "number": ("int64", []), "trace": ("int32", None), "metadata": (None, None),
    }  # fmt: skip


def test_samples_of_every_kind_hold_what_they_held() -> None:
    found = everything(WRITTEN / "shards/writer")
    metadata = found.pop("metadata")
    assert found == {name: [plain(parts.odd_sample(n)[name]) for n in (1, 2)] for name in parts.odd_sample(1)}
    assert [(entry["sample_id"], entry["trial"]) for entry in metadata] == [(parts.odd_id(n), n) for n in (1, 2)]


def test_arrays_that_were_stored_as_pickles_are_read() -> None:
    assert everything(WRITTEN / "shards/pyd", fields=["x"]) == {"x": plain(numbered(3, 2))}


@pytest.mark.parametrize(
    ("where", "items"), [("foreign", range(1, 6)), ("foreign/a-{000000..000000}.tar", range(1, 4))]
)
def test_archives_of_others_are_read_by_the_index_they_were_given(where: str, items: range) -> None:
    assert everything(WRITTEN / where) == {"x": [[item, item + 100] for item in items], "cls": list(items)}


def test_items_that_were_found_damaged_stay_known_and_have_the_same_substitutes(copied: Any) -> None:
    folder = copied("shards/arrays", "quarantine.jsonl")
    parts.damage(folder / "shards/arrays")
    options = {"on_error": "substitute", "quarantine": folder / "quarantine.jsonl"}
    assert (
        everything(folder / "shards/arrays", max_bad_items=2, **options)["number"]
        == stored("quarantine_values.json")["number"]
    )
    assert digests(folder)["quarantine.jsonl"] == digests(WRITTEN)["quarantine.jsonl"]
    with pytest.raises(ps.DamageError, match="more than max_bad_items=1 items are bad"):
        everything(folder / "shards/arrays", max_bad_items=1, **options)


def test_a_simulation_holds_what_it_held() -> None:
    frames, metadata = numbered(11, 3, 4), numbered(3, 5)
    metadata[:, 4] = [0, 1, 1]
    assert plain(ps.load_metadata(WRITTEN / "simulation")) == plain(metadata)
    for place, column in enumerate(("VOLTAGE", "STIMULUS", "CALCIUM", "FLUORESCENCE")):
        found = ps.load_column_slice(WRITTEN / "simulation", ps.FlyVisSim[column], 2, 9)
        assert plain(found) == plain(frames[2:9, :, place])


# -- conversions -------------------------------------------------------------------------------------------------------


def test_converted_data_sets_hold_what_they_held() -> None:
    assert plain(parts.converted_values(WRITTEN)) == stored("converted/values.json")


@pytest.mark.parametrize("part", ["train", "val"])
def test_the_statistics_of_a_conversion_are_read(part: str) -> None:
    about = ps.ShardedDatasetInfo(WRITTEN / "converted/split" / part).get_summary()["metadata"]["statistics"]
    moments = {name: ps.Moments.from_json(entry) for name, entry in about["fields"].items()}
    assert about["of"] == "train"
    assert {name: (plain(made.mean), plain(made.count)) for name, made in moments.items()} == {
        "x": (3.5, 6), "number": (3.0, 3),
    }  # fmt: skip
    assert {name: made.to_json() for name, made in moments.items()} == about["fields"]


@pytest.mark.parametrize("name", ["split", "npy", "zarr", "audio", "shards", "function"])
def test_a_finished_conversion_is_known_to_be_finished(name: str, copied: Any) -> None:
    # Resuming one that was begun with other inputs or options is refused: their names and values are part of the file.
    folder = copied("converted", "sound", "shards/gz")
    given = parts.conversions(folder)[name]
    ps.convert_to_shards(given.pop("inputs"), folder / "converted" / name, resume=True, **given)
    assert digests(folder / "converted" / name) == digests(WRITTEN / "converted" / name)


def test_a_killed_conversion_goes_on_to_the_same_bytes(copied: Any) -> None:
    folder = copied("converted/inputs", "unfinished/convert")
    kept = folder / "unfinished/convert/.writing/shard_000000.tar"
    before = kept.stat().st_ino
    summary = parts.convert_unfinished(folder, folder / "unfinished/convert", resume=True)
    found = digests(folder / "unfinished/convert")
    found.pop("dataset_metadata.json")  # which names the versions of other packages
    assert found == stored("unfinished/digests.json")["convert"]
    assert (folder / "unfinished/convert/shard_000000.tar").stat().st_ino == before
    assert summary["metadata"]["statistics"]["fields"]["x"]["mean"] == [6.5]


# -- unfinished writes -------------------------------------------------------------------------------------------------


def test_a_killed_writer_goes_on_to_the_same_bytes(copied: Any) -> None:
    folder = copied("unfinished/writer") / "unfinished/writer"
    with parts.begin_unfinished(folder, resume=True) as writer:
        assert writer.written == 2
        for number in (2, 3):
            writer.write_sample(parts.unfinished_sample(number), metadata={"trial": number + 1})
    assert digests(folder) == stored("unfinished/digests.json")["writer"]


def test_a_data_set_that_was_being_moved_into_place_is_moved(copied: Any) -> None:
    folder = copied("unfinished/publish") / "unfinished/publish"
    with parts.begin_unpublished(folder, resume=True) as writer:
        assert writer.written == 3
    assert digests(folder) == stored("unfinished/digests.json")["publish"]


def _image(folder: Path, label: str) -> list[Any]:
    source = [ps.ZarrSource(folder / label / level) for level in ("s0", "s1")]
    return [plain(level.read(ps.Span(0, len(level.index)))["data"]) for level in source]


def _expected(sign: int) -> list[Any]:
    fine = numbered(2, 4, 4) * sign
    coarse = fine.reshape(1, 2, 2, 2, 2, 2).mean(axis=(1, 3, 5))
    return [plain(fine), plain(coarse)]


def test_a_predicted_image_holds_what_it_held_and_is_left_alone(copied: Any) -> None:
    folder = copied("cell", "predictions")
    assert [_image(folder / "predictions", label) for label in ("mito", "er")] == [_expected(1), _expected(-1)]
    with parts.predictions(folder / "cell/em", folder / "predictions", resume=True) as writer:
        assert writer.remaining_indices == []
    assert digests(folder / "predictions") == digests(WRITTEN / "predictions")


@pytest.mark.parametrize("blend", ["abut", "linear"])
def test_a_killed_prediction_goes_on_with_what_is_missing(blend: str, copied: Any) -> None:
    folder = copied("cell", f"unfinished/{blend}")
    out = folder / "unfinished" / blend
    with parts.predictions(folder / "cell/em", out, blend=blend, resume=True) as writer:
        assert writer.remaining_indices == writer.writer_indices[2:]
        for item in writer.remaining_indices:
            writer[item] = parts.predicted(writer, item)
    assert [_image(out, label) for label in ("mito", "er")] == [_expected(1), _expected(-1)]
    if blend == "abut":
        whole = WRITTEN / "predictions"
        assert {path: (out / path).read_text() for path in ("mito/.zattrs", "er/.zattrs")} == {
            path: (whole / path).read_text() for path in ("mito/.zattrs", "er/.zattrs")
        }


# -- single files ------------------------------------------------------------------------------------------------------


def test_a_run_file_makes_a_report(tmp_path: Path) -> None:
    run, page = stored("run.json"), ps.write_report(tmp_path / "page.html", run=WRITTEN / "run.json").read_text()
    assert run["plan"]["order_hash"] in page
    assert run["plan"]["description"] in page
    assert all(f"{loss:.4g}" in page for loss in run["recorded"]["loss"]["mean"])
    assert "1 value of loss" in page


def test_a_tuning_is_read_on_a_machine_of_its_kind(tmp_path: Path) -> None:
    content, path = stored("tuning.json"), tmp_path / "tuning.json"
    path.write_text(json.dumps({**content, "machine": {**content["machine"], "cpus": 1_000_000}}))
    with pytest.raises(ps.OptionError, match="was tuned with 1,000,000 CPUs") as refused:
        ps.Tuning.load(path)
    (here,) = re.findall(r"this machine has (\d+)", str(refused.value))
    content["machine"]["cpus"] = int(here)
    path.write_text(json.dumps(content))
    tuning = ps.Tuning.load(path)
    # The verdict is words about the figures, written again from them.
    assert {**tuning.to_dict(), "verdict": ""} == {**content, "verdict": ""}
    assert tuning.loader_kwargs()["num_workers"] == 2
    assert tuning.loader_kwargs()["options"] == ps.RunOptions(executor="threads", prefetch=3)


def test_moments_are_the_same_to_the_last_bit() -> None:
    made = parts.moments()
    for name, entry in stored("moments.json").items():
        read = ps.Moments.from_json(entry)
        assert read == made[name]
        assert read.to_json() == entry
        more = ps.Moments.from_json(entry).merge(read)
        assert more == made[name].merge(made[name])


def test_folds_that_were_kept_are_taken_without_a_search(copied: Any) -> None:
    cache = copied("folds.json") / "folds.json"
    assert parts.found_folds(cache) == stored("folds_found.json")
    assert cache.read_bytes() == (WRITTEN / "folds.json").read_bytes()
    # Another seed in the file gives other folds: it is the file that they come from.
    content = json.loads(cache.read_bytes())
    cache.write_text(json.dumps({**content, "seeds": dict.fromkeys(content["seeds"], 7)}))
    assert [entry["seed"] for entry in parts.found_folds(cache).values()] == [7, 7]


def test_an_interrupted_fold_goes_on_at_its_next_epoch(copied: Any) -> None:
    folder, dataset, rest = copied("fold") / "fold", parts.Noted(), stored("fold/rest.json")
    history = parts.train_fold(dataset, folder)["history"]
    assert dataset.asked == rest["asked"]
    for name, values in rest["history"].items():
        if isinstance(values, list):
            assert history[name][:2] == values[:2]  # these two epochs are in the checkpoint
        # What follows is arithmetic, which machines do not agree on to the last bit.
        assert history[name] == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize("name", list(stored("orders.json")))
def test_orders_are_what_they_were(name: str) -> None:
    assert parts_states.described(parts_states.plans()[name]) == stored("orders.json")[name]
