"""The one limit for what an item may expand to."""

import subprocess
import sys

import pytest

from penstock.core.errors import OptionError, ReadError, SourceError
from penstock.core.limits import check_expansion, expansion_reason, max_item_bytes


@pytest.mark.parametrize(("stored", "limit"), [(0, 256 << 20), (1 << 20, 256 << 20), (1 << 24, 100 << 24)])
def test_the_limit_is_256_mib_or_a_hundred_times_what_is_stored(stored: int, limit: int) -> None:
    assert max_item_bytes(stored) == limit


def test_the_environment_sets_the_256_mib_and_not_the_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MAX_ITEM_BYTES", "1000")
    assert (max_item_bytes(7), max_item_bytes(11)) == (1000, 1100)


def test_the_environment_reaches_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MAX_ITEM_BYTES", "12345")
    code = "from penstock.core.limits import max_item_bytes; print(max_item_bytes(1))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "12345"


@pytest.mark.parametrize("text", ["", "0", "-1", "1e9", "256MiB", "1.5", "٣", "9" * 5000])
def test_an_invalid_value_of_the_variable_is_an_option_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MAX_ITEM_BYTES", text)
    with pytest.raises(OptionError, match=r"PENSTOCK_MAX_ITEM_BYTES must be an integer >= 1 .*, got '") as caught:
        max_item_bytes(1)
    assert len(str(caught.value)) < 200


def test_the_limit_itself_is_allowed_and_one_byte_more_is_not() -> None:
    check_expansion("x.wav", 100 << 24, 1 << 24)
    with pytest.raises(
        SourceError,
        match=r"x\.wav would take 1,677,721,601 bytes of memory, but may take at most 1,677,721,600, since 16,777,216 "
        r"bytes of it are stored; if it is valid, set the environment variable PENSTOCK_MAX_ITEM_BYTES to the number",
    ):
        check_expansion("x.wav", (100 << 24) + 1, 1 << 24)
    with pytest.raises(ReadError, match="PENSTOCK_MAX_ITEM_BYTES"):
        check_expansion("x", 1 << 40, 1, error=ReadError)


def test_an_unknown_size_is_said_to_be_more_than_the_limit() -> None:
    assert expansion_reason("it", None, 5).startswith("it would take more than 268,435,456 bytes of memory")
