"""Inputs that once made a parser fail, and some thousand random ones: the fuzz in a short form."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.campaign.fuzz.minimise import minimise

_ROOT = Path(__file__).parents[2]
_CORPUS = _ROOT / "tests" / "corpus"


@pytest.mark.timeout(900)
def test_no_parser_fails_on_the_corpus_or_on_random_input() -> None:
    # The time is only there for a parser that hangs; a slow machine tries the same inputs.
    command = [sys.executable, "-m", "bench.campaign.fuzz", "--light", "--inputs", "3000", "--seconds", "300"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^([\d,]+) inputs to \d+ parsers, 0 findings", done.stdout, re.M)
    assert found is not None, done.stdout
    assert int(found[1].replace(",", "")) > 3000, "the corpus and the seeds come on top"


def test_corpus_files_are_small_and_named_after_what_is_wrong() -> None:
    files = [path for path in _CORPUS.rglob("*") if path.is_file() and path.name != "README.md"]
    assert files
    assert [str(path) for path in files if path.suffix != ".bin" or path.stat().st_size > 1 << 16] == []
    saved = re.compile(r"(escaped|memory|wrote|warned|wrong|slow|hung|crashed)-[0-9a-f]{8}")
    assert [str(path) for path in files if saved.fullmatch(path.stem)] == [], (
        "rename them: what is wrong with the input?"
    )


def test_a_failing_input_is_made_as_small_as_it_goes() -> None:
    content = bytes(range(200)) + b"{bad}" + bytes(range(100))
    assert minimise(content, lambda part: b"bad" in part) == b"bad"
