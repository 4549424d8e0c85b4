"""Which tests are slow, and what all tests save.

Several tests run at once, each with processes of its own: what is done twice here is waited for everywhere.
"""

import gc
import itertools
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from penstock_cases import spread_cases
from penstock_remote import Endpoint, serve_http, serve_s3

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

# `make test &`, nohup and some runners ignore Ctrl-C for all that they start, and tests press it.
for _signal in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_signal) == signal.SIG_IGN:
        signal.signal(_signal, signal.default_int_handler if _signal == signal.SIGINT else signal.SIG_DFL)

# Tests that kill, start processes or whole programs, build packages, or ask what the kernel keeps in its page cache,
# which other tests change; beginnings of paths. `make test` leaves them
# out, `make test-all` and CI run them.
SLOW = (
    "browser",
    "cli/test_convert_urls.py",
    "contracts/test_webdataset_snippets.py",
    "convert/inputs/test_audio.py",
    "convert/inputs/test_zarr.py",
    "convert/nwb",
    "convert/test_convert.py",
    "convert/test_engines.py",
    "convert/test_examples.py",
    "convert/test_read_ahead.py",
    "convert/test_urls.py",
    "demo/test_story.py",
    "docs/test_notebooks.py",
    "docs/test_snippets.py",
    "doctor/test_examination.py",
    "doctor/test_leftovers.py",
    "faults",
    "files/stores/test_faults.py",
    "files/stores/test_forks.py",
    "files/stores/test_stalls.py",
    "files/test_read_ahead.py",
    "feed/test_loader_transfers.py",
    "laws/test_loader",
    "laws/test_remote",
    "packaging",
    "recipes/cellmap/predictions/test_writer_ends.py",
    "recipes/cellmap/test_example.py",
    "recipes/cellmap/test_loader.py",
    "recipes/cellmap/test_remote.py",
    "recipes/cellmap/test_workers.py",
    "recipes/chunked/test_audio_example.py",
    "recipes/crossval",
    "recipes/streams/test_memory.py",
    "recipes/streams/test_resume.py",
    "recipes/trainers",
    "recipes/tune/test_waiting.py",
    "recipes/webdataset/test_auto_order.py",
    "recipes/webdataset/test_library.py",
    "recipes/webdataset/test_loader.py",
    "recipes/webdataset/test_remote.py",
    "recipes/webdataset/test_resume.py",
    "recipes/workersafe/test_workers.py",
    "report/figures/test_items.py",
    "run/test_executors.py",
    "shard/outputs",
    "soak",
    "source/audio/test_read_ahead.py",
    "source/stored/test_hint_faults.py",
    "source/stored/test_other_formats.py",
    "source/stored/test_read_ahead.py",
    "source/stored/test_remote.py",
    "source/stored/test_workers.py",
    "source/table/test_workers.py",
    "source/tar/test_files.py",
    "source/tar/test_pages.py",
    "source/tar/test_remote.py",
    "source/test_native.py",
    "source/test_native_pages.py",
    "source/test_read_ahead.py",
    "source/volume/test_read_ahead.py",
)
_TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `SLOW`, and leave out cases of those with many."""
    if os.environ.get("PENSTOCK_TESTS") != "soak":
        items[:] = spread_cases(items)
    slow = tuple(str(_TESTS / name) for name in SLOW)
    for item in items:
        if str(item.path).startswith(slow):
            item.add_marker("slow")


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
