"""What the site needs beyond what is written in docs/: links and anchors that work there as they do in the repository.

A hook of mkdocs, named in mkdocs.yml. Pages are written to be read in the repository, where a link may lead to a test
or an example, and an anchor is what GitHub makes of a title. The site has neither tests nor examples.
"""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["anchor", "linked_names", "on_config", "on_page_markdown", "read_exports", "without_outside_links"]

_FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_ROW = re.compile(r"^\| `(\w+)` \|", re.M)
_EXPORT = re.compile(r"^from (penstock\.[\w.]+) import (\w+) as \2$", re.M)
_PACKAGE = Path(__file__).parents[1] / "src" / "penstock"


def anchor(title: str, separator: str) -> str:
    """Return the anchor of a title as GitHub makes it: the one that the links of the pages use."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", separator)


def without_outside_links(text: str, page: str) -> str:
    """Return the text of `page`, a path in docs/, with links to files outside of docs/ as words that say the path."""

    def replaced(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link[2]))
        if target == "docs" or target.startswith("docs/"):
            return link[0]
        return f'<span class="outside" title="{target} in the repository">{link[1]}</span>'

    return _outside_fences(text, lambda prose: _LINK.sub(replaced, prose))


def linked_names(text: str) -> str:
    """Return the text of the table of names, with each name as a link to its entry in the reference."""
    homes = read_exports()
    return _ROW.sub(lambda row: f"| [`{row[1]}`][{homes[row[1]]}.{row[1]}] |", text)


def read_exports() -> dict[str, str]:
    """Return the module of every public name, from the stubs of the package, which is not imported."""
    # The stubs of the root and of recipes/ name namespaces, and names that a folder's own stub has too.
    stubs = [stub for stub in _PACKAGE.rglob("__init__.pyi") if stub.parent not in (_PACKAGE, _PACKAGE / "recipes")]
    return {name: home for stub in stubs for home, name in _EXPORT.findall(stub.read_text())}


def _outside_fences(text: str, change: Callable[[str], str]) -> str:
    # With a group, split keeps what it splits at: every second part is a fence.
    parts = _FENCE.split(text)
    parts[::2] = map(change, parts[::2])
    return "".join(parts)


def on_config(config: Any) -> Any:
    """Make the anchors of titles."""
    config["mdx_configs"]["toc"]["slugify"] = anchor
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change the text of a page before it becomes HTML."""
    path = page.file.src_uri
    if path == "reference/api.md":
        markdown = linked_names(markdown)
    return without_outside_links(markdown, path)
