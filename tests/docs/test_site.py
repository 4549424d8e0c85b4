"""The site has every page, and its reference every public name and every error."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from penstock_scripts import load_script

from penstock.core import errors

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs"
_ERRORS = _DOCS / "reference" / "errors"
_LITERAL = re.compile(r'f?"((?:[^"\\\n]|\\.)*)"')
_TEXT = re.compile(rf"((?:{_LITERAL.pattern.replace('(', '(?:', 1)}\s*)+)")
_VALUE = re.compile(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
_SITE = yaml.safe_load((_ROOT / "mkdocs.yml").read_text())


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    return load_script("tools/docs_site.py")


def _pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in _pages(entry)]


def _kind(name: str) -> type[Exception]:
    kind: type[Exception] = getattr(errors, name)
    return kind


# -- the site ----------------------------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation_once():
    there = sorted(str(page.relative_to(_DOCS)) for page in _DOCS.rglob("*.md"))
    assert sorted(_pages(_SITE["nav"])) == there


def test_the_navigation_has_four_parts_after_the_first_page():
    assert [next(iter(entry)) for entry in _SITE["nav"]] == ["Home", "Tutorial", "How-to", "Reference", "Explanation"]
    folders = ["tutorial", "how-to", "reference", "explanation"]
    for folder, entry in zip(folders, _SITE["nav"][1:], strict=True):
        assert {page.split("/")[0] for page in _pages(list(entry.values()))} == {folder}


def test_a_build_with_a_warning_fails_and_reading_needs_no_network():
    assert _SITE["strict"] is True
    assert _SITE["validation"] == {
        "nav": {"omitted_files": "warn"},
        "links": {"absolute_links": "warn", "unrecognized_links": "warn", "anchors": "warn"},
    }
    assert _SITE["theme"]["font"] is False
    files = [*_SITE["extra"]["polyfills"], *_SITE["extra_css"], _SITE["theme"]["favicon"]]
    assert [file for file in files if not (_DOCS / file).is_file()] == []
    assert "://" not in re.sub(r"^ *#.*$", "", (_ROOT / "mkdocs.yml").read_text(), flags=re.M).replace("file://", "")


def test_links_out_of_the_docs_become_words_and_others_stay(hook):
    page = "explanation/guarantees.md"
    text = "See [a test](../../tests/plan/test_plan.py), [ranks](../how-to/resume.md#go-on), [there](https://a.org/b)."
    assert hook.without_outside_links(text, page) == (
        'See <span class="outside" title="tests/plan/test_plan.py in the repository">a test</span>, '
        "[ranks](../how-to/resume.md#go-on), [there](https://a.org/b)."
    )
    assert hook.without_outside_links("[one](../README.md)", "index.md").startswith("<span")
    assert hook.without_outside_links("[one](../README.md)", "how-to/index.md") == "[one](../README.md)"


def test_code_is_not_taken_for_a_link(hook):
    code = "```python\nrows[index](../../x.py)\n```"
    assert hook.without_outside_links(f"{code}\n\n[x](../../x.py)", "a/b.md").startswith(f"{code}\n\n<span")


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("What went wrong, and what to do", "what-went-wrong-and-what-to-do"),
        ("`out` holds", "out-holds"),
        ("A – b", "a--b"),
        ("8. Größe", "8-größe"),
    ],
)
def test_anchors_are_those_of_the_repository(hook, title, expected):
    assert hook.anchor(title, "-") == expected


def test_names_in_the_table_lead_to_their_entries(hook):
    row = "| `Loader` | batches; `len`, `close` | [first](../tutorial/first-training.md) |"
    assert hook.linked_names(row) == row.replace("`Loader`", "[`Loader`][penstock.feed.loader.Loader]")
    linked = hook.linked_names((_DOCS / "reference" / "api.md").read_text())
    expected = {f"{home}.{name}" for name, home in hook.read_exports().items()}
    assert set(re.findall(r"\]\[([\w.]+)\]", linked)) == expected


# -- the reference -----------------------------------------------------------------------------------------------------


def test_the_reference_has_an_entry_for_every_public_name(hook):
    pages = sorted((_DOCS / "reference" / "api").glob("*.md"))
    entries = [entry for page in pages for entry in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M)]
    assert sorted(entries) == sorted(f"{home}.{name}" for name, home in hook.read_exports().items())


def test_each_part_of_the_table_links_to_the_page_with_its_entries(hook):
    homes = hook.read_exports()
    parts = re.split(r"^## ", (_DOCS / "reference" / "api.md").read_text(), flags=re.M)[1:]
    for part in parts:
        (link,) = re.findall(r"\((api/[\w-]+\.md)\)", part)
        entries = re.findall(r"^::: ([\w.]+)$", (_DOCS / "reference" / link).read_text(), re.M)
        assert [f"{homes[name]}.{name}" for name in re.findall(r"^\| `(\w+)` \|", part, re.M)] == entries, link


# -- the errors --------------------------------------------------------------------------------------------------------


def test_every_error_has_a_page_and_every_page_an_error():
    assert sorted(page.stem for page in _ERRORS.glob("*.md")) == sorted(errors.__all__)


@pytest.mark.parametrize("name", errors.__all__)
def test_the_page_of_an_error_shows_it_being_raised(name):
    # That the code prints what stands below it is tested with all other pages, in test_snippets.
    text = (_ERRORS / f"{name}.md").read_text()
    code, output = re.search(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", text, re.M | re.S).groups()
    assert f"except ps.{name} as error:" in code
    raised = re.findall(r"\b([A-Z]\w+(?:Error|Dependency))\b", output)
    assert raised
    if name == "PenstockError":
        assert all(issubclass(_kind(one), errors.PenstockError) for one in raised if one in errors.__all__)
    else:
        assert 'print(f"{type(error).__name__}: {error}"' in code
        assert output.startswith(f"{name}: ")


@pytest.mark.parametrize("name", sorted(set(errors.__all__) - {"PenstockError"}))
def test_the_page_of_an_error_says_what_it_is_and_how_to_catch_it(name):
    text = (_ERRORS / f"{name}.md").read_text()
    first = text.partition("## ")[0]
    for parent in _kind(name).__bases__:
        assert f"`{parent.__name__}`" in first
    assert re.findall(r"^## (.*)$", text, re.M) == ["Messages", "Catch it"]


def test_messages_on_the_pages_of_errors_are_those_of_the_source():
    templates = _templates()
    for name in sorted(set(errors.__all__) - {"PenstockError"}):
        text = re.sub(r"^\| extra \|.*?\n\n", "", (_ERRORS / f"{name}.md").read_text(), flags=re.M | re.S)
        quoted = re.findall(r"^\| `(.+?)` \| ", text, re.M)
        assert quoted, name
        assert [message for message in quoted if not _is_one_of(message, templates)] == [], name


def test_a_message_that_the_source_cannot_make_is_found():
    templates = ["There is no field …; the data set has …."]
    assert _is_one_of("There is no field …; the data set has ….", templates)
    assert not _is_one_of("There is no field …; the data set had ….", templates)
    assert not _is_one_of("the data set has …; There is no field ….", templates)


def _is_one_of(message: str, templates: list[str]) -> bool:
    """Say whether a message, with … for values, is one that the source can make."""
    parts = [part for part in message.split("…") if part.strip(" .:;,()=")]
    longest = max(parts, key=len)
    pattern = re.compile(".*".join(re.escape(part) for part in parts), re.S)
    return any(longest in template and pattern.search(template) for template in templates)


def _templates() -> list[str]:
    """Return the texts in the source, with … in the place of values; far faster than parsing it."""
    found = []
    for file in (_ROOT / "src").rglob("*.py"):
        for literals in _TEXT.findall(file.read_text()):
            whole = "".join(_LITERAL.findall(literals))
            found.append(_VALUE.sub("…", whole))
    return found
