"""Every Python and console block of the README and the docs is run, and what it prints is what the page shows.

The blocks of a page are run in order, in one namespace, in an empty directory. A ```text block right after a Python
block is its output; a block that prints must be followed by one. A ```console block has lines `$ penstock ...`, each
with its output below it; a comment `<!-- exit code 1 -->` above it says how its last command ends, if not with 0.

Code that only makes data for a page is written into a comment, which no reader sees: `<!-- setup`, the lines of code,
`-->`. A block is left out only under a comment that says why: `<!-- not run: needs a GPU -->`.
"""

import contextlib
import io
import itertools
import os
import re
import shlex
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from penstock.cli import app

_ROOT = Path(__file__).parents[2]
_PAGES = sorted([*_ROOT.glob("*.md"), *(_ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(
    r"^(?P<before><!--\s*(?P<comment>[^\n]*?)\s*-->\n+)?```(?P<language>\w*)\n(?P<body>.*?)^```$", re.M | re.S
)
_SETUP = re.compile(r"^<!-- setup\n(?P<body>.*?)^-->$", re.M | re.S)
_SECONDS = re.compile(r"\b(in|and) [\d.]+ s\b")  # shown as "in … s"
_HDF5_SIZE = re.compile(r"eof = \d+")
_STORAGE = re.compile(r"^(Storage|Order)( +).*$", re.M)  # measured; shown as "Storage  …"


@dataclass
class _Snippet:
    line: int
    code: str
    output: str
    exit_code: int | None = None  # of the commands of a console block; None for Python


def _fences(text: str) -> list[re.Match[str]]:
    return list(_FENCE.finditer(text))


def _snippets(text: str) -> list[_Snippet]:
    fences = _fences(text)
    found = []
    for fence, following in itertools.zip_longest(fences, fences[1:]):
        if fence["language"] not in ("python", "console") or _left_out(fence):
            continue
        line, body = text.count("\n", 0, fence.start("body")), fence["body"]
        if fence["language"] == "console":
            commands = "".join(f"{command}\n" for command in re.findall(r"^\$ (.*)$", body, re.M))
            found.append(_Snippet(line, commands, body, _exit_code(fence)))
            continue
        follows = following is not None and not text[fence.end() : following.start()].strip()
        output = following["body"] if follows and following["language"] == "text" else ""
        found.append(_Snippet(line, body, output))
    found += [_Snippet(text.count("\n", 0, setup.start("body")), setup["body"], "") for setup in _SETUP.finditer(text)]
    return sorted(found, key=lambda snippet: snippet.line)


def _exit_code(fence: re.Match[str]) -> int:
    code = re.fullmatch(r"exit code (\d+)", fence["comment"] or "")
    return int(code[1]) if code else 0


def _run_commands(commands: str) -> tuple[str, int]:
    """Return what a terminal would show, without paths and times of this machine, and the last exit code."""
    shown, code = "", 0
    for command in commands.splitlines():
        assert code == 0, f"a command before {command!r} failed"
        program, *arguments = shlex.split(command)
        assert program == "penstock"
        done = CliRunner().invoke(app, arguments)
        said, code = (done.stdout + done.stderr).replace(f"{Path.cwd()}/", ""), done.exit_code
        said = _STORAGE.sub(r"\1\2…", _SECONDS.sub(r"\1 … s", said))
        shown += f"$ {command}\n" + _HDF5_SIZE.sub("eof = …", said)
    return shown, code


def _left_out(fence: re.Match[str]) -> bool:
    comment = fence["comment"] or ""
    if not comment.startswith("not run"):
        return False
    assert re.fullmatch(r"not run: .{8,}", comment), f"say why a block is not run, got {comment!r}"
    return True


def _with_code(pages: list[Path]) -> list[Path]:
    return [page for page in pages if _snippets(page.read_text())]


@pytest.mark.parametrize("page", _with_code(_PAGES), ids=lambda page: str(page.relative_to(_ROOT)))
@mock.patch.dict(os.environ)  # what a page sets ends with it
def test_the_code_of_a_page_runs_and_prints_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    for snippet in _snippets(page.read_text()):
        if snippet.exit_code is not None:
            assert _run_commands(snippet.code) == (snippet.output, snippet.exit_code), (
                f"{page.name}, line {snippet.line}"
            )
            continue
        printed = io.StringIO()
        # Empty lines in front, so that a traceback shows the line of the page.
        code = compile("\n" * snippet.line + snippet.code, str(page), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, module.__dict__)
        assert printed.getvalue() == snippet.output, f"{page.name}, line {snippet.line}"


def test_the_readme_has_the_shortest_use():
    lines = [
        "import numpy as np, penstock as ps",
        'data = ps.open({"x": np.arange(103)})      # or "shards", "s3://bucket/train", "rows.zarr", "*.wav", …',
        "with data.shuffle(seed=7).batch(8).loader(num_workers=2) as loader:",
        '    for batch in loader:                   # {"x": tensor of 8}',
        '        train(batch["x"])',
        '    torch.save(loader.state_dict(), "loader.pt")',
    ]
    assert "\n".join(lines) in (_ROOT / "README.md").read_text()


def test_a_page_whose_output_is_wrong_is_found():
    text = "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n"
    (snippet,) = _snippets(text)
    assert (snippet.line, snippet.code, snippet.output) == (1, "print(1 + 1)\n", "3\n")


def test_a_block_is_left_out_only_with_a_reason():
    assert _snippets("<!-- not run: needs a CUDA device -->\n```python\nx\n```\n") == []
    assert len(_snippets("<!-- a remark -->\n```python\nx\n```\n")) == 1
    with pytest.raises(AssertionError, match="say why"):
        _snippets("<!-- not run -->\n```python\nx\n```\n")


def test_the_code_of_a_hidden_setup_is_run_in_its_place():
    text = "```python\nx = 1\n```\n\n<!-- setup\nx += 1\n\nx += 1\n-->\n\n```python\nprint(x)\n```\n\n```text\n3\n```\n"
    first, setup, last = _snippets(text)
    assert (first.code, setup.code, last.code) == ("x = 1\n", "x += 1\n\nx += 1\n", "print(x)\n")
    assert (setup.line, setup.output, last.output) == (5, "", "3\n")


def test_a_console_block_is_run_and_has_the_exit_code_that_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (snippet,) = _snippets("<!-- exit code 2 -->\n```console\n$ penstock check --all nowhere\nhealthy\n```\n")
    assert (snippet.code, snippet.output, snippet.exit_code) == (
        "penstock check --all nowhere\n",
        "$ penstock check --all nowhere\nhealthy\n",
        2,
    )
    shown, code = _run_commands(snippet.code)
    assert shown.startswith("$ penstock check --all nowhere\nError: ")
    assert code == 2


def test_every_block_says_its_language():
    unnamed = [
        f"{page.relative_to(_ROOT)}, line {page.read_text().count(chr(10), 0, fence.start()) + 1}"
        for page in _PAGES
        for fence in _fences(page.read_text())
        if not fence["language"]
    ]
    assert unnamed == []
