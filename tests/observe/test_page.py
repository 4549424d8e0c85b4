"""The report: the page agrees with an independent computation, and no data becomes markup."""

import json
import re
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock_download_parts import CountedDownloads
from typer.testing import CliRunner

from penstock import DamageError, Loader, OptionError, Plan, Sequential, TarSource, Timings, create_shards_from_arrays
from penstock.cli import app
from penstock.convert.convert import convert
from penstock.convert.inputs.arrays import NpyInput
from penstock.convert.scan import ConvertOptions
from penstock.convert.splits import Split
from penstock.observe.html import DARK, LIGHT, Html, join, tag
from penstock.observe.page import gather_report, write_report
from penstock.observe.watcher import watch
from penstock.recipes.webdataset import WebDatasetLoader, WebDatasetWriter
from penstock.shard.outputs.write_options import WriteOptions

EVIL = "<script>alert('x')</script>"
_VOID = {"meta", "img", "br", "link", "input"}


class Page(HTMLParser):
    """A page taken apart: elements with their attributes and text; whether all that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self.tables: dict[str, list[list[str]]] = {}
        self._open: list[tuple[str, str]] = []
        self._label = ""
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {key: value or "" for key, value in attrs}
        self.elements.append((tag, named))
        if tag == "table":
            self.tables[self._label] = []
        if tag == "tr":
            self.tables[self._label].append([])
        if tag in ("td", "th"):
            self.tables[self._label][-1].append("")
        if named.get("role") == "region":
            self._label = named["aria-label"]
        if tag not in _VOID:
            self._open.append((tag, named.get("id", "")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for name, ident in self._open:
            for key in {name, f"#{ident}"} if ident else {name}:
                self.texts.setdefault(key, []).append(data)
        if any(name in ("td", "th") for name, _ in self._open):
            self.tables[self._label][-1][-1] += data

    def named(self, name: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.elements if tag == name]

    def text(self, key: str) -> str:
        return "".join(self.texts.get(key, []))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "shards & <b>bold"
    with WebDatasetWriter(folder, shard_size=30, metadata={"lab": EVIL}) as writer:
        for item in range(100):
            writer.write_sample({"x": np.full((4, 3), item, np.float32), "label": np.int64(item % 3)})
    return folder


@pytest.fixture(scope="module")
def run_file(shards: Path) -> Path:
    # Item 40 is damaged: its bytes are 40.0, four times three.
    damaged = shards.parent / "damaged"
    create_shards_from_arrays(damaged, {"x": np.repeat(np.arange(100, dtype=np.float32), 12).reshape(100, 12)}, 30)
    path = sorted(damaged.glob("*.tar"))[1]
    content = path.read_bytes()
    path.write_bytes(content.replace(np.full(12, 40, np.float32).tobytes(), np.full(12, 41, np.float32).tobytes()))
    source = TarSource(damaged, on_error="substitute")
    with Loader(source, Plan(source.index, Sequential(), batch_size=10, seed=8), observer=Timings()) as loader:
        with watch(loader, show=False) as found:
            for _ in range(3):
                for number, _batch in enumerate(found):
                    found.record(**{EVIL: 1.0 - number / 20, "steps": 1000.0 + number})
        found.save(shards.parent / "run.json")
    return shards.parent / "run.json"


@pytest.fixture(scope="module")
def whole(shards: Path, run_file: Path) -> tuple[str, Page]:
    """The page of a dataset and of a run on another one."""
    path = write_report(shards.parent / "both.html", dataset=shards, run=run_file, title=EVIL)
    text = path.read_text()
    return text, Page(text)


# -- what it says ------------------------------------------------------------------------------------------------------


def test_totals_and_fields_are_those_of_the_dataset(whole: tuple[str, Page], shards: Path) -> None:
    _, page = whole
    total = sum(path.stat().st_size for path in shards.glob("*.tar"))
    assert f"holds 100 items in 4 shards, {total / 1e3:.3g} kB: x, label." in page.text("#glance")
    assert "4 shards of 10 to 30 items each" in page.text("#dataset")
    assert page.tables["Fields"] == [
        ["field", "type", "shape per item", "size per item", "stored as"],
        ["x", "float32", "4 × 3", "48 bytes", ".npy"],
        ["label", "int64", "one value", "8 bytes", ".npy"],
        ["metadata", "json", "varies", "varies", ".json"],
    ]


def test_the_shuffle_of_a_dataset_is_that_of_its_loader(shards: Path) -> None:
    plan = WebDatasetLoader(shards, shuffle=True).plan(32)
    report = gather_report(dataset=shards)
    assert report.shuffle is not None
    assert report.shuffle["mixing"]["score"] == plan.mixing().score
    assert report.shuffle["order_hash"] == plan.order_hash() == report.made["order_hash"]
    order = [item for draw in (plan.epoch(0).draw(n) for n in range(plan.n_batches)) for item in draw.items.tolist()]
    assert report.shuffle["access"]["items"] == order
    assert report.shuffle["access"]["borders"] == [30, 60, 90]
    assert list(report.items) == [0, 49, 99]
    assert report.faults == []


def test_the_order_and_the_faults_of_the_run_are_in_the_page(whole: tuple[str, Page]) -> None:
    _, page = whole
    assert "Sequential() over 100 items, batches of 10, seed 8" in page.text("#shuffle")
    assert "mixing score 0.00" in page.text("#shuffle")
    assert "rising line" in page.text("#shuffle")
    (fault,) = page.tables["Faults"][1:]
    assert fault[0] == "data.quarantine"
    assert fault[1].startswith("Item 40 of shard_000001.tar is in quarantine: the checksum of ")
    assert "penstock check " in fault[2]
    assert "1 fault: Item 40 of shard_000001.tar is in quarantine" in page.text("#glance")
    assert "30 batches in 3 epochs, 300 items" in page.text("#glance")


def test_curves_stages_and_memory_are_charts_with_their_numbers(whole: tuple[str, Page]) -> None:
    _, page = whole
    words = [attributes["aria-label"] for attributes in page.named("div") if attributes.get("role") == "img"]
    assert all(len(text) > 20 for text in words)
    assert len(words) == 7 + 3  # charts and items
    for chart in ("access", "training-0", "training-1", "throughput", "shares", "stages", "memory"):
        assert page.text(f"#chart-{chart}"), chart
    # Values of another magnitude are in a chart of their own.
    assert page.tables[f"{EVIL} by batch: numbers"][1] == ["1", "1"]
    assert page.tables["steps by batch: numbers"][1] == ["1", "1000"]
    assert "went from 1 to 0.55 (lowest 0.55, highest 1)" in page.text("#training")
    assert {row[0] for row in page.tables["Stages"][1:]} >= {"read", "wait"}
    assert {row[1] for row in page.tables["Stages"][1:] if row[0] == "wait"} == {"30"}


def test_downloads_are_a_section_if_the_run_read_from_a_url(tmp_path: Path, whole: tuple[str, Page]) -> None:
    source = CountedDownloads(80)
    with watch(Loader(source, Plan(source.index, Sequential(), batch_size=4)), show=False) as found:
        list(found)
    found.save(tmp_path / "run.json")
    page = Page(write_report(tmp_path / "page.html", run=tmp_path / "run.json").read_text())
    assert "60 kB in 60 requests, 8 retries, 25 % from the cache" in page.text("#chart-downloads")
    assert "67 % of the download time was hidden (7.5 s waited)" in page.text("#chart-downloads")
    assert "#downloads" not in whole[1].texts


def test_the_split_of_a_conversion_is_said(tmp_path: Path) -> None:
    for number, name in enumerate("abc"):
        np.save(tmp_path / f"{name}.npy", np.arange(12, dtype=np.float64) + 100 * number)
    split = Split((("train", 0.67), ("val", 0.33)), group_by="file")
    inputs = [NpyInput(tmp_path / f"{name}.npy") for name in "abc"]
    convert(inputs, tmp_path / "out", ConvertOptions(write=WriteOptions(shard_size=8), split=split))
    report = gather_report(dataset=tmp_path / "out", title="splits")  # the folder of the splits
    assert report.dataset is not None
    assert report.dataset["split"]["name"] == "train"
    page = Page(write_report(tmp_path / "page.html", dataset=tmp_path / "out" / "val").read_text())
    assert "It is val of the splits train 0.67, val 0.33, by file: no file is in two of them." in page.text("#dataset")


def test_there_is_one_figure_of_items_per_second_and_it_is_explained(whole: tuple[str, Page]) -> None:
    _, page = whole
    (rate,) = re.findall(r"items per second ?([\d,.]+)", page.text("#glance"))
    assert f"{rate} items per second of waiting and training, without the start" in page.text("#chart-throughput")


def test_a_missing_shard_is_a_fault_and_not_an_error(tmp_path: Path) -> None:
    create_shards_from_arrays(tmp_path / "shards", {"x": np.arange(10)}, shard_size=4)
    (tmp_path / "shards" / "shard_000001.tar").unlink()
    page = Page(write_report(tmp_path / "page.html", dataset=tmp_path / "shards").read_text())
    assert page.tables["Faults"][1][:2] == ["data.shards", "shard_000001.tar is missing."]
    assert "no order to show" in page.text("#shuffle")
    assert "missing" in page.text("#dataset")


def test_a_damaged_item_that_would_be_drawn_is_named_and_its_neighbour_drawn(tmp_path: Path) -> None:
    create_shards_from_arrays(tmp_path / "shards", {"x": np.full((2, 5), 0x5A5A5A5A, np.int64)}, shard_size=4)
    path = tmp_path / "shards" / "shard_000000.tar"
    content, wanted = path.read_bytes(), np.full(5, 0x5A5A5A5A, np.int64).tobytes()
    path.write_bytes(content.replace(wanted, wanted[:-1] + b"\1", 1))
    report = gather_report(dataset=tmp_path / "shards")
    assert list(report.items) == [1]
    (fault,) = report.faults
    assert (fault.name, fault.level) == ("data.item", "problem")
    assert fault.text.startswith("Item 0 in shard_000000.tar is damaged: ")


def test_without_matplotlib_the_page_says_what_to_install_and_the_rest_is_there(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = Page(write_report(tmp_path / "page.html", dataset=shards).read_text())
    assert "pip install 'penstock[report]'" in page.text("#dataset")
    assert page.named("svg") == []
    assert page.tables["Access map: which item comes when: numbers"]


def test_sections_that_nothing_fills_say_what_would(tmp_path: Path) -> None:
    with watch([torch.zeros(2)] * 4, show=False) as found:
        for _ in found:
            pass
    found.save(tmp_path / "run.json")
    page = Page(write_report(tmp_path / "page.html", run=tmp_path / "run.json").read_text())
    assert "watched.record(loss=loss.item())" in page.text("#training")
    assert "observer=Timings()" in page.text("#stages")
    assert "has no plan, so that its order is unknown" in page.text("#shuffle")
    assert "None: all shards are present" in page.text("#faults")
    assert "dataset" not in {attributes.get("id") for attributes in page.named("section")}


# -- how it is made ----------------------------------------------------------------------------------------------------


def test_nothing_in_the_data_is_markup(whole: tuple[str, Page]) -> None:
    text, page = whole
    assert page.named("script") == []
    assert page.named("b") != []
    assert EVIL not in text
    assert page.text("h1") == EVIL
    assert page.tables["Metadata"][1:] == [["lab", EVIL]]
    assert "shards & <b>bold" in page.text("#made")


def test_markup_is_made_of_escaped_text_only() -> None:
    assert tag("p", EVIL, title='"><i>') == (
        "<p title=\"&quot;&gt;&lt;i&gt;\">&lt;script&gt;alert('x')&lt;/script&gt;</p>"
    )
    assert join("<", Html("<br/>"), None, tag("td")) == "&lt;<br/><td></td>"


def test_the_page_needs_nothing_from_elsewhere(whole: tuple[str, Page]) -> None:
    text, page = whole
    links = [
        value
        for _, attributes in page.elements
        for key, value in attributes.items()
        if key in ("src", "href", "xlink:href")
    ]
    assert links
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", text)
    assert "@import" not in text
    policies = [meta["content"] for meta in page.named("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_the_page_can_be_read_without_seeing_it(whole: tuple[str, Page]) -> None:
    _, page = whole
    assert page.named("html") == [{"lang": "en"}]
    assert len(page.named("h1")) == len(page.named("main")) == len(page.named("nav")) == 1
    levels = [int(name[1]) for name, _ in page.elements if re.fullmatch(r"h[1-6]", name)]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    idents = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(idents)) == len(idents)
    for name, attributes in page.elements:
        if name == "svg":
            assert attributes.get("aria-hidden") == "true"  # what is around it has its words
        for target in attributes.get("aria-labelledby", "").split():
            assert target in idents
            assert page.text(f"#{target}")
        if name == "a":
            assert attributes["href"][1:] in idents
    assert len(page.named("figure")) == len(page.named("figcaption"))


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_texts_and_charts_stand_out_from_their_ground(theme: dict[str, str]) -> None:
    def contrast(one: str, other: str) -> float:
        low, high = sorted((_luminance(theme[one]), _luminance(theme[other])))
        return (high + 0.05) / (low + 0.05)

    for text in ("text", "soft", "link", "good", "bad"):
        assert min(contrast(text, "ground"), contrast(text, "card")) >= 4.5, text
    for series in range(6):
        assert contrast(f"s{series}", "ground") >= 3, series
    assert LIGHT.keys() == DARK.keys()


# -- refusals and the command line -------------------------------------------------------------------------------------


def test_what_no_page_can_be_made_of_is_refused(tmp_path: Path, run_file: Path) -> None:
    with pytest.raises(OptionError, match=r"requires dataset=.* or run="):
        write_report(tmp_path / "page.html")
    with pytest.raises(OptionError, match=r"nowhere does not exist"):
        write_report(tmp_path / "page.html", dataset=tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(OptionError, match=r"requires a folder of shards.*, got .*notes\.txt"):
        write_report(tmp_path / "page.html", dataset=tmp_path / "notes.txt")
    with pytest.raises(OptionError, match="path must be a file"):
        write_report(tmp_path, run=run_file)
    with pytest.raises(OptionError, match=r"must exist, got .*missing\. Create it first"):
        write_report(tmp_path / "missing" / "page.html", run=run_file)
    (tmp_path / "half.json").write_bytes(run_file.read_bytes()[:500])
    with pytest.raises(DamageError, match=r"half\.json"):
        write_report(tmp_path / "page.html", run=tmp_path / "half.json")
    assert not (tmp_path / "page.html").exists()


def test_the_command_writes_a_page_and_prints_json(tmp_path: Path, run_file: Path) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["inspect", *arguments])

    page = str(tmp_path / "page.html")
    done = run(str(run_file), "--page", page)
    assert done.exit_code == 0, done.output
    assert f"Wrote {page}." in done.output
    found = json.loads(run(str(run_file), str(run_file.parent / "damaged"), "--page", page, "--json").stdout)
    assert (found["page"], found["dataset"]["items"]) == (page, 100)
    assert found["run"]["figures"]["batches"] == 30
    assert found["shuffle"]["mixing"]["score"] == 0.0
    assert "data.quarantine" in [fault["name"] for fault in found["faults"]]
    assert "Watched: 30 batches in 3 epochs" in run(str(run_file)).stdout
    (tmp_path / "foreign.json").write_text("{}")
    for arguments, words in (
        ((str(tmp_path / "nowhere"),), "No such file or folder"),
        ((str(tmp_path / "foreign.json"),), "Penstock does not read .json files"),
        ((str(run_file), str(run_file)), "At most one place may be given, or a run file and its dataset"),
    ):
        failed = run(*arguments, "--page", str(tmp_path / "other.html"))
        assert failed.exit_code == 2
        assert words in failed.output
    assert not (tmp_path / "other.html").exists()
