"""The report in a real browser: it renders, requests nothing, logs no errors, and fits a phone.

PENSTOCK_BROWSER_TESTS=1 runs these, and fails without a browser. Otherwise they are skipped without one.
Screenshots go to the folder that PENSTOCK_SCREENSHOTS names.
"""

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Loader, Plan, TarSource, Timings, WindowShuffle
from penstock.observe.page import write_report
from penstock.observe.watcher import watch
from penstock.recipes.webdataset import WebDatasetWriter

sys.path.insert(0, str(Path(__file__).parent))

from chromium import Chromium, found_browser  # beside this file

_NEEDED = os.environ.get("PENSTOCK_BROWSER_TESTS") == "1"

pytestmark = pytest.mark.skipif(
    found_browser() is None and not _NEEDED, reason="no browser: PENSTOCK_BROWSER_TESTS=1 makes that an error"
)

_CHARTS = ["access", "training-0", "throughput", "shares", "stages", "memory"]
_SIZES = {"wide": 1200, "phone": 400}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a dataset with a damaged item, and of a training on it."""
    folder = tmp_path_factory.mktemp("page")
    rng = np.random.default_rng(0)
    with WebDatasetWriter(folder / "shards", shard_size=40, metadata={"<script>": "</style><script>x()</script>"}) as w:
        for item in range(160):
            w.write_sample({"spikes": rng.poisson(0.4, (50, 24)).astype(np.uint8), "label": np.int64(item)})
    shard = sorted((folder / "shards").glob("*.tar"))[1]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0xFF
    shard.write_bytes(bytes(content))
    source = TarSource(folder / "shards", on_error="substitute", chunk_items=20)
    plan = Plan(source.index, WindowShuffle(3), batch_size=8, seed=1)
    with Loader(source, plan, observer=Timings()) as loader:
        with watch(loader, show=False) as watched:
            for _ in range(3):
                for number, _batch in enumerate(watched):
                    watched.record(loss=2.0 / (1 + number), accuracy=number / 20)
        watched.save(folder / "run.json")
    return write_report(
        folder / "report.html", dataset=folder / "shards", run=folder / "run.json", title="A <title> & more"
    )


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    path = found_browser()
    assert path is not None, "these tests need chromium: apt-get install chromium, or set PENSTOCK_BROWSER"
    running = Chromium(path, tmp_path_factory.mktemp("profile"))
    yield running
    running.close()


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("PENSTOCK_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


_BOXES = """
[...document.querySelectorAll('figure[id] .picture svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  const drawn = [...svg.querySelectorAll('path,image,use')].filter(mark => mark.getBoundingClientRect().width > 1);
  const inside = [...svg.querySelectorAll('text')].every(text => {
    const at = text.getBoundingClientRect();
    return at.left >= box.left - 1 && at.right <= box.right + 1 && at.top >= box.top - 1 && at.bottom <= box.bottom + 1;
  });
  const size = Math.min(...[...svg.querySelectorAll('text')].map(text => text.getBoundingClientRect().height));
  return {id: svg.closest('figure').id, width: box.width, height: box.height, marks: drawn.length, inside, size};
})
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", _SIZES)
def test_the_page_renders_whole_and_asks_for_nothing(
    browser: Chromium, page: Path, screenshots: Path, size: str, scheme: str
) -> None:
    browser.open(page, width=_SIZES[size], height=900, scheme=scheme)
    picture = browser.screenshot(screenshots / f"report-{size}-{scheme}.png")
    assert browser.complaints() == []
    assert browser.requests() == [page.absolute().as_uri()]
    charts: list[dict[str, Any]] = browser.value(_BOXES)
    assert sorted(chart["id"] for chart in charts) == sorted(f"chart-{name}" for name in _CHARTS)
    for chart in charts:
        assert chart["width"] > 250, chart
        assert chart["height"] > 60, chart
        assert chart["marks"] > 0, chart
        assert chart["inside"], f"{chart['id']} has letters that are cut off"
        assert chart["size"] >= 9, f"{chart['id']} has letters that are too small to read"
    _check_not_blank(picture)


def _check_not_blank(png: bytes) -> None:
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        colours = image.convert("RGB").getcolors(1 << 24)
    assert colours is not None
    assert len(colours) > 100


@pytest.mark.parametrize("width", [320, 400, 720, 1200])
def test_nothing_reaches_over_the_edge_of_the_window(browser: Chromium, page: Path, width: int) -> None:
    browser.open(page, width=width, height=800, scheme="light")
    browser.value("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert browser.value("document.documentElement.scrollWidth") <= width
    outside = browser.value(
        "[...document.querySelectorAll('body *')].filter(part => part.getBoundingClientRect().right > innerWidth + 1"
        " && !part.closest('.skip')).map(part => part.outerHTML.slice(0, 80))"
    )
    assert outside == []
    # Nor has anything to be scrolled sideways: tables become lists, and drawings have a narrow version.
    cut = browser.value(
        "[...document.querySelectorAll('body *')].filter(part => part.scrollWidth > part.clientWidth + 1"
        " && getComputedStyle(part).overflowX !== 'visible' && !part.closest('.skip'))"
        ".map(part => [part.className, part.scrollWidth, part.clientWidth, part.getAttribute('aria-label')])"
    )
    assert cut == []


def test_letters_of_a_chart_do_not_lie_on_each_other(browser: Chromium, page: Path) -> None:
    for width in _SIZES.values():
        browser.open(page, width=width, height=800, scheme="light")
        over = browser.value(
            """
            [...document.querySelectorAll('figure[id] .picture svg')].flatMap(svg => {
              const texts = [...svg.querySelectorAll('text')];
              const boxes = texts.map(text => [text.getBoundingClientRect(), text.textContent]);
              return boxes.flatMap(([a, one], n) => boxes.slice(n + 1).filter(([b]) =>
                a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3
              ).map(([, other]) => `${one} / ${other}`));
            })
            """
        )
        assert over == []


def test_dark_is_dark_and_light_is_light(browser: Chromium, page: Path) -> None:
    grounds = {}
    for scheme in ("light", "dark"):
        browser.open(page, width=1100, height=800, scheme=scheme)
        colour = browser.value("getComputedStyle(document.body).backgroundColor")
        grounds[scheme] = [int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    assert min(grounds["light"]) > 240
    assert max(grounds["dark"]) < 60


@pytest.mark.parametrize("size", _SIZES)
def test_pictures_have_the_ground_and_the_colours_of_the_page(browser: Chromium, page: Path, size: str) -> None:
    seen = []
    for scheme in ("light", "dark"):
        browser.open(page, width=_SIZES[size], height=800, scheme=scheme)
        style = "getComputedStyle(document.querySelector('.picture svg text')).fill"
        text, body = browser.value(f"[{style}, getComputedStyle(document.body).color]")
        assert text in (body, browser.value("getComputedStyle(document.querySelector('.soft')).color"))
        seen.append(text)
        widths = browser.value("[...document.querySelectorAll('.picture svg')].map(svg => svg.clientWidth)")
        assert min(widths) > 280
    assert seen[0] != seen[1]


def test_a_page_that_complains_or_asks_for_something_is_found_out(browser: Chromium, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<!DOCTYPE html><img src='missing.png'><script>console.error('no'); undefined_name()</script>")
    browser.open(bad, width=390, height=800, scheme="light")
    complaints = " ".join(browser.complaints())
    assert all(word in complaints for word in ("loadingFailed", "consoleAPICalled", "exceptionThrown"))
    assert browser.requests() == [bad.as_uri(), (tmp_path / "missing.png").as_uri()]


def test_what_the_data_says_is_text(browser: Chromium, page: Path) -> None:
    browser.open(page, width=1100, height=800, scheme="light")
    assert browser.value("document.title") == "A <title> & more"
    assert browser.value("document.querySelector('h1').textContent") == "A <title> & more"
    assert browser.value("document.scripts.length") == 0
    assert "</style><script>x()</script>" in browser.value("document.querySelector('#dataset').textContent")
    pictures = "[...document.querySelectorAll('[role=img]')].map(part => part.getAttribute('aria-label').slice(0, 5))"
    assert browser.value(pictures).count("Item ") == 3
