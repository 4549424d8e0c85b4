"""Every Python block of the README and the docs is run, and what it prints is what the page shows.

The blocks of a page are run in order, in one namespace, in an empty directory. A ```text block right after a Python
block is its output; a block that prints must be followed by one. A block is left out only under a comment that says
why: `<!-- not run: needs a GPU -->`.
"""

import contextlib
import io
import itertools
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PAGES = sorted([*_ROOT.glob("*.md"), *(_ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(
    r"^(?P<before><!--\s*(?P<comment>[^\n]*?)\s*-->\n+)?```(?P<language>\w*)\n(?P<body>.*?)^```$", re.M | re.S
)


@dataclass
class _Snippet:
    line: int
    code: str
    output: str


def _fences(text: str) -> list[re.Match[str]]:
    return list(_FENCE.finditer(text))


def _snippets(text: str) -> list[_Snippet]:
    fences = _fences(text)
    found = []
    for fence, following in itertools.zip_longest(fences, fences[1:]):
        if fence["language"] != "python" or _left_out(fence):
            continue
        follows = following is not None and not text[fence.end() : following.start()].strip()
        output = following["body"] if follows and following["language"] == "text" else ""
        found.append(_Snippet(text.count("\n", 0, fence.start("body")), fence["body"], output))
    return found


def _left_out(fence: re.Match[str]) -> bool:
    comment = fence["comment"] or ""
    if not comment.startswith("not run"):
        return False
    assert re.fullmatch(r"not run: .{8,}", comment), f"say why a block is not run, got {comment!r}"
    return True


def _with_code(pages: list[Path]) -> list[Path]:
    return [page for page in pages if _snippets(page.read_text())]


@pytest.mark.parametrize("page", _with_code(_PAGES), ids=lambda page: str(page.relative_to(_ROOT)))
def test_the_code_of_a_page_runs_and_prints_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    for snippet in _snippets(page.read_text()):
        printed = io.StringIO()
        # Empty lines in front, so that a traceback shows the line of the page.
        code = compile("\n" * snippet.line + snippet.code, str(page), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, module.__dict__)
        assert printed.getvalue() == snippet.output, f"{page.name}, line {snippet.line}"


def test_the_readme_has_the_shortest_use():
    lines = [
        "import numpy as np, penstock as ps",
        'source = ps.ArraySource({"x": np.arange(103)})',
        "plan = ps.Plan(source.index, ps.Shuffle(), batch_size=8, seed=7)",
        "with ps.Loader(source, plan, num_workers=2) as loader:",
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


def test_every_block_says_its_language():
    unnamed = [
        f"{page.relative_to(_ROOT)}, line {page.read_text().count(chr(10), 0, fence.start()) + 1}"
        for page in _PAGES
        for fence in _fences(page.read_text())
        if not fence["language"]
    ]
    assert unnamed == []
