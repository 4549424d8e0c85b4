"""Many shards, few open files, several threads: files are opened in turns, shared and closed."""

import resource
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_test_parts import eventually, open_files, read_answer, run_isolated, start_script
from penstock_test_shards import uniform, write

from penstock import ReadError, TarSource

FEW_FILES = """
import json, resource, sys, threading
import numpy as np
from penstock import TarSource

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
source, failures = TarSource(sys.argv[1]), []

def read(seed):
    rng = np.random.default_rng(seed)
    try:
        for turn in range(6):
            items = rng.permutation(60)
            block = source.take(items)
            assert block["x"].tolist() == items.tolist()
            assert [about["sample_id"] for about in block["metadata"]] == [f"sample_{i:09d}" for i in items]
    except BaseException as error:
        failures.append(repr(error))

threads = [threading.Thread(target=read, args=(seed,)) for seed in range(int(sys.argv[2]))]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps(failures))
"""


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("compression", ["none", "gz"])
def test_more_shards_than_files_may_be_open_are_read_in_turns(tmp_path: Path, compression: str, threads: int) -> None:
    samples = [{"x": np.int64(i), "y": np.full(3, i, np.float32)} for i in range(60)]
    write(tmp_path / "set", samples, shard_size=1, compression=compression)
    with start_script(tmp_path, FEW_FILES, str(tmp_path / "set"), str(threads)) as process:
        assert read_answer(process) == []


NO_FILES = """
import json, os, resource, sys
from pathlib import Path
import numpy as np
from penstock import DamageError, PenstockError, TarSource

folder = Path(sys.argv[1])
source = TarSource(folder, on_error=sys.argv[2])
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
try:
    found = source.take(np.arange(8))["x"].tolist()
except Exception as error:
    found = [isinstance(error, OSError), isinstance(error, PenstockError), isinstance(error, DamageError)]
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(json.dumps([found, (folder / "quarantine.jsonl").exists(), source.take(np.arange(8))["x"].tolist()]))
"""


@pytest.mark.parametrize("on_error", ["raise", "substitute"])
@pytest.mark.parametrize("compression", ["none", "gz"])
def test_an_item_is_not_bad_because_this_process_has_no_file_left_to_open(
    tmp_path: Path, compression: str, on_error: str
) -> None:
    write(tmp_path / "set", uniform(0, 8), shard_size=2, compression=compression)
    with start_script(tmp_path, NO_FILES, str(tmp_path / "set"), on_error) as process:
        found, quarantined, after = read_answer(process)
    assert found == [True, True, False], "a ReadError, and no damage"
    assert not quarantined
    assert after == list(range(8))


def read_with_small_files(folder: Path) -> str:
    source = TarSource(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    try:
        return str(source.take(np.arange(8)))
    except ReadError as error:
        return f"{type(error).__name__}: {error}"


def test_a_shard_is_not_damaged_because_the_system_takes_only_a_part_of_its_bytes(tmp_path: Path) -> None:
    write(tmp_path / "set", uniform(0, 8), shard_size=8, compression="gz")
    found = run_isolated(read_with_small_files, tmp_path / "set")
    assert found.startswith("ReadError: Could not decompress shard_000000.tar: [Errno 27] File too large")


def test_close_closes_every_file(tmp_path: Path) -> None:
    write(tmp_path / "set", uniform(0), compression="gz")
    source, before = TarSource(tmp_path / "set"), open_files()
    source.take(np.arange(23))
    assert open_files() != before
    source.close()
    assert eventually(lambda: open_files() == before)


def test_a_garbage_collected_source_closes_every_file(tmp_path: Path) -> None:
    write(tmp_path / "set", uniform(0), compression="gz")
    before = open_files()
    source = TarSource(tmp_path / "set")
    source.take(np.arange(23))
    del source
    assert eventually(lambda: open_files() == before)


def test_threads_that_open_one_shard_get_the_same_object(tmp_path: Path) -> None:
    write(tmp_path / "set", uniform(0), shard_size=23, compression="xz")
    for _ in range(10):
        source, found, start = TarSource(tmp_path / "set", fields=["x"]), [], threading.Barrier(4)

        def read(source: TarSource = source, found: list[Any] = found, start: threading.Barrier = start) -> None:
            start.wait(120)
            found.append(source.take(np.arange(23))["x"].tolist())

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [list(range(23))] * 4
        source.close()
