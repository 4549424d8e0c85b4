"""The page about security says what the code does: its limits are the constants, its tests are there."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest
from penstock_tree import MODULES, parse

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "explanation" / "security.md"
_ROW = re.compile(r"^\| (.+?) \| ([\d,]+)[^|]* \| `(penstock[\w.]+)\.(\w+)` \|$", re.M)
_CONNECTING = {"socket", "ssl", "http", "urllib", "ftplib", "smtplib", "requests", "httpx", "aiohttp", "websockets"}
_HARMLESS = {"urllib", "urllib.parse"}  # texts only
_LOCAL_SOCKETS = {
    # A pair of sockets between a forked child and the process that does its requests:
    "penstock.files.stores.clients.client_process",
    "penstock.files.stores.clients.process_client",
}


def test_the_limits_of_the_page_are_those_of_the_code() -> None:
    table = _PAGE.read_text().split("## Limits")[1].split("\n## ")[0]
    rows = _ROW.findall(table)
    assert len(rows) == len(re.findall(r"^\| ", table, re.M)) - 1  # and the head
    wrong = [
        f"{what}: {number} on the page, {value:,} in {module}.{name}"
        for what, number, module, name in rows
        if (value := getattr(importlib.import_module(module), name)) != int(number.replace(",", ""))
    ]
    assert wrong == []


def test_every_attack_is_linked_to_a_test() -> None:
    table = _PAGE.read_text().split("## What is defended")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?!---|attack)(.*?) \| .* \| (.*) \|$", table, re.M)
    assert len(rows) > 10
    for attack, proof in rows:
        links = re.findall(r"\]\(([^)]+)\)", proof)
        assert links, attack
        places = [(_PAGE.parent / link).resolve().relative_to(_ROOT) for link in links]
        assert all(place.parts[0] in ("tests", "bench") and (_ROOT / place).exists() for place in places), attack


def test_the_root_has_the_page_that_github_shows() -> None:
    assert "docs/explanation/security.md" in (_ROOT / "SECURITY.md").read_text()


@pytest.mark.parametrize("name", sorted(_CONNECTING))
def test_modules_that_open_connections_are_known(name: str) -> None:
    found = {module for module in MODULES if any(name in names for names in _list_imports(module))}
    assert found == (_LOCAL_SOCKETS if name == "socket" else set())


@cache
def _list_imports(module: str) -> list[set[str]]:
    """Return what each statement of a module imports that is not harmless."""
    found = [_find_imports(node) for node in ast.walk(parse(MODULES[module]))]
    return [names for names in found if not names <= _HARMLESS]


def _find_imports(node: ast.AST) -> set[str]:
    """Return the modules that a statement imports, and the packages they are in."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return {".".join(parts[: n + 1]) for name in names for parts in [name.split(".")] for n in range(len(parts))}
