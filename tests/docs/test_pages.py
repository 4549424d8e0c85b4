"""The docs say what is there: links lead somewhere, lists are complete."""

import importlib
import re
from pathlib import Path

import pytest
import typer

import penstock
from penstock.cli import app
from penstock.core import errors

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs"
_PAGES = sorted([*_ROOT.glob("*.md"), *_DOCS.rglob("*.md")])
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def _name(page: Path) -> str:
    return str(page.relative_to(_ROOT))


def _prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$|^<!--.*?-->$", "", page.read_text(), flags=re.M | re.S)


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", _prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", _PAGES, ids=_name)
def test_every_link_leads_somewhere(page):
    broken = []
    for link in _LINK.findall(_prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_can_be_reached_from_the_index():
    reached: set[Path] = set()
    waiting = [_DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        links = [link.partition("#")[0] for link in _LINK.findall(_prose(page)) if "://" not in link]
        waiting += [(page.parent / link).resolve() for link in links if link]
    assert sorted(_name(page) for page in set(_DOCS.rglob("*.md")) - reached) == []


def test_every_page_begins_with_one_title():
    wrong = [_name(page) for page in _PAGES if len(re.findall(r"^# ", _prose(page), re.M)) != 1]
    assert wrong == []
    assert [_name(page) for page in _PAGES if not page.read_text().startswith("# ")] == []


def test_the_api_reference_lists_each_name_once_under_the_place_to_import_it_from():
    parts = re.split(r"^## ", (_DOCS / "reference" / "api.md").read_text(), flags=re.M)[1:]
    listed = {part.split("\n")[0]: re.findall(r"^\| `(\w+)` \|", part, re.M) for part in parts}
    assert sorted(listed["penstock"]) == penstock.__all__
    for place, names in listed.items():
        package = importlib.import_module(place)
        at_root = set() if place == "penstock" else set(penstock.__all__)
        assert sorted(names) == sorted(set(package.__all__) - at_root), place
    every = [name for names in listed.values() for name in names]
    assert sorted(every) == sorted(set(every))


def test_the_error_reference_lists_every_error_with_its_parents():
    text = (_DOCS / "reference" / "errors.md").read_text()
    for name in errors.__all__:
        kind = getattr(errors, name)
        parents = ", ".join(f"`{parent.__name__}`" for parent in kind.__bases__)
        assert f"| [`{name}`](errors/{name}.md) | {parents} |" in text


def test_the_command_reference_names_every_command_and_option():
    text = (_DOCS / "reference" / "cli.md").read_text()
    command = typer.main.get_command(app)
    commands = getattr(command, "commands", {})
    assert commands
    for name, sub in commands.items():
        assert f"## penstock {name}" in text
        for parameter in sub.params:
            assert all(f"`{option}" in text for option in parameter.opts)
    assert sorted(re.findall(r"^## penstock (\w+)", text, re.M)) == sorted(commands)


def test_guarantees_are_all_linked_to_tests():
    page = _DOCS / "explanation" / "guarantees.md"
    promises = page.read_text().partition("\n## Faults")[0]  # bench/campaign has those of the table of faults
    rows = re.findall(r"^\| (?!---|promise)(.*?) \| (.*) \|$", promises, re.M)
    assert rows
    for promise, proof in rows:
        links = _LINK.findall(proof)
        assert links, promise
        for link in links:
            target = (page.parent / link).resolve()
            assert target.is_file(), f"{promise}: {link}"
            assert target.is_relative_to(_ROOT / "tests"), link


def test_decisions_are_dated_and_say_what_was_weighed():
    pages = sorted((_DOCS / "explanation" / "decisions").glob("*.md"))
    assert pages
    for page in pages:
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}-[a-z0-9-]+\.md", page.name)
        titles = re.findall(r"^## (.*)$", page.read_text(), re.M)
        assert titles == ["Question", "Options", "Choice"], page.name


def test_no_page_carries_a_placeholder():
    words = re.compile(r"\b(TODO|TBD|FIXME|XXX|lorem ipsum|coming soon)\b", re.I)
    assert [_name(page) for page in _PAGES if words.search(page.read_text())] == []
