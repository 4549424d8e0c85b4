"""Which tests are slow, and what all tests save.

Several tests run at once, each with processes of its own: what is done twice here is waited for everywhere.
"""

import gc
import itertools
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from penstock_cases import spread_cases
from penstock_remote import Endpoint, serve_http, serve_s3
from penstock_slow import mark_slow, measure

pytest.register_assert_rewrite(
    "penstock_cellmap_parts",
    "penstock_convert_parts",
    "penstock_nwb_parts",
    "penstock_ome_parts",
    "penstock_source_suite",
    "penstock_test_parts",
    "penstock_test_shards",
)

# Threads of torch and of BLAS wait for each other in a loop where tests share the cores. Processes that tests start
# inherit this; whoever sets it keeps what was set.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# Packages that keep files below the home, such as pynwb and IPython, fail or warn if nobody can write there.
if not os.access(Path.home(), os.W_OK):
    _CACHE = tempfile.TemporaryDirectory(prefix="penstock-tests-", ignore_cleanup_errors=True)
    for _name in ("XDG_CACHE_HOME", "IPYTHONDIR"):
        os.environ.setdefault(_name, _CACHE.name)

# `make test &`, nohup and some runners ignore Ctrl-C for all that they start, and tests press it.
for _signal in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_signal) == signal.SIG_IGN:
        signal.signal(_signal, signal.default_int_handler if _signal == signal.SIGINT else signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests, and leave out cases of those with many."""
    if os.environ.get("PENSTOCK_TESTS") != "soak":
        items[:] = spread_cases(items)
    mark_slow(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Set aside the hundreds of thousands of objects that collecting makes, and that stay.

    None of them is garbage to look for, and a process that is forked off would copy what it goes through.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


if _FOLDER := os.environ.get("PENSTOCK_SECONDS_FOLDER"):  # `python tools/run_tests.py measure`

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
        """Write down how long a test takes."""
        return (yield from measure(item, _FOLDER))


_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """A bucket of this machine, for all tests of a process; `s3` is for one test."""
    with serve_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def http_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """A web server of this machine, for all tests of a process; `http_files` is for one test."""
    with serve_http(tmp_path_factory.mktemp("http")) as server:
        yield server


@pytest.fixture
def s3(s3_server: Endpoint) -> Iterator[Endpoint]:
    """A folder of its own in a bucket, on a server that breaks nothing yet."""
    s3_server.reset()
    yield s3_server.below(f"test{next(_NUMBERS)}")
    s3_server.reset()


@pytest.fixture
def http_files(http_server: Endpoint) -> Iterator[Endpoint]:
    """A folder of its own behind a web server that breaks nothing yet."""
    http_server.reset()
    yield http_server.below(f"test{next(_NUMBERS)}")
    http_server.reset()
