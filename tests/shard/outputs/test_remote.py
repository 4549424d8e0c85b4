"""Datasets at a URL: the bytes of a local one, and never half of one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_remote import Endpoint
from penstock_webdataset_library import read_by_the_library, tars

from penstock import TarSource, create_shards_from_arrays
from penstock.core.errors import OptionError, SourceError, WriteError
from penstock.files.stores.options import StoreOptions
from penstock.recipes.webdataset import WebDatasetWriter
from penstock.shard.manifest import Manifest
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.writer import ShardWriter
from tests.shard.samples import contents, numbers, sample, write

N_SAMPLES = 8


def write_to(
    s3: Endpoint, n_samples: int = N_SAMPLES, *, first: int = 0, options: StoreOptions | None = None, **more: Any
) -> Manifest:
    """Write samples `first` … to the folder of a bucket."""
    overwrite, resume = more.pop("overwrite", False), more.pop("resume", False)
    writer = ShardWriter(
        s3.url,
        WriteOptions(**{"shard_size": 3, **more}),
        overwrite=overwrite,
        resume=resume,
        store=options or s3.options,
    )
    try:
        for number in range(first + writer.written, first + n_samples):
            writer.write(sample(number), None, {"number": number})
        return writer.commit()
    finally:
        writer.abandon()


def hasty(s3: Endpoint) -> StoreOptions:
    return StoreOptions(s3.options.endpoint, "us-east-1", credentials=s3.options.credentials, retries=1)


@pytest.mark.parametrize(
    "more", [{}, {"compression": "gz"}, {"shard_name_pattern": "t{shard_idx}.tar"}, {"layout": "columns"}], ids=str
)
def test_it_has_the_bytes_of_a_local_dataset(s3: Endpoint, tmp_path: Path, more: dict[str, Any]) -> None:
    local = write(tmp_path, N_SAMPLES, **more)
    found = write_to(s3, **more)
    assert contents(s3.folder) == contents(tmp_path)
    assert (found.fingerprint, found.folder, list(found.shards)) == (local.fingerprint, s3.url, list(local.shards))


def test_shards_of_several_parts_have_the_bytes_of_local_ones(s3: Endpoint, tmp_path: Path) -> None:
    rows = np.arange(3 << 21, dtype=np.int64).reshape(3, -1)  # 48 MB in one shard: parts are 8 or 16 MB
    remote = create_shards_from_arrays(str(s3.url), {"x": rows}, store=s3.options, show_progress=False)
    local = create_shards_from_arrays(tmp_path, {"x": rows}, show_progress=False)
    assert remote == local
    assert contents(s3.folder) == contents(tmp_path)


def test_the_library_webdataset_reads_what_was_written(s3: Endpoint) -> None:
    write_to(s3)
    found = read_by_the_library(tars(s3.folder))
    assert [int(item["x.npy"][0]) for item in found] == list(range(N_SAMPLES))


def test_nothing_is_published_before_the_end_and_the_manifest_comes_last(s3: Endpoint) -> None:
    writer = WebDatasetWriter(str(s3.url), shard_size=3, store=s3.options)
    for number in range(7):
        writer.write_sample(sample(number))
    assert not (s3.folder / "dataset_metadata.json").exists()
    with pytest.raises(SourceError, match=r"No dataset at s3://.*: a writer has not finished there"):
        TarSource(str(s3.url), store=s3.options)
    writer.finalize()
    assert len(TarSource(str(s3.url), store=s3.options).index) == 7
    put = [name for method, name, _, _ in s3.log() if method in ("PUT", "POST")]
    last = max(place for place, name in enumerate(put) if ".tar" in name)
    assert put.index("dataset_metadata.json") > last
    assert sorted(contents(s3.folder)) == sorted(
        ["dataset_metadata.json", *(f"shard_00000{n}.tar{end}" for n in range(3) for end in ("", ".index"))]
    )


def test_a_dataset_is_replaced_at_once_and_its_shards_stay_until_then(s3: Endpoint, tmp_path: Path) -> None:
    write_to(s3)
    before = contents(s3.folder)
    with pytest.raises(WriteError, match=r"s3://.* holds a dataset already. Replace it with overwrite=True"):
        write_to(s3)
    writer = ShardWriter(s3.url, WriteOptions(3), overwrite=True, store=s3.options)
    for number in range(7):
        writer.write(sample(100 + number), None, {"number": 100 + number})
    writer._place.shards.wait()
    assert {name: contents(s3.folder)[name] for name in before} == before
    found = writer.commit()
    assert set(contents(s3.folder)) & set(before) == {"dataset_metadata.json"}
    assert numbers(s3.folder) == list(range(100, 107))
    write(tmp_path, 7, make=lambda number: sample(100 + number))
    assert len(found.shards) == 3
    again = ShardWriter(s3.url, WriteOptions(3), resume=True, store=s3.options)
    assert again.written == 7
    again.abandon()


def test_archives_of_others_are_neither_replaced_nor_removed(s3: Endpoint) -> None:
    (s3.folder / "shard_000000.tar").write_bytes(b"not ours")
    write_to(s3)
    assert (s3.folder / "shard_000000.tar").read_bytes() == b"not ours"
    assert numbers(s3.folder) == list(range(N_SAMPLES))


def test_a_large_manifest_has_its_table(s3: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.shard.manifest._TABLE_FROM", 3)
    write(tmp_path, N_SAMPLES)
    write_to(s3)
    assert contents(s3.folder) == contents(tmp_path)
    write_to(s3, 2, overwrite=True)
    assert not (s3.folder / "dataset_metadata.shards").exists()


# -- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "xz"])
@pytest.mark.parametrize("stopped", [0, 2, 3, 7])
def test_resuming_ends_in_the_same_bytes(s3: Endpoint, tmp_path: Path, stopped: int, compression: Any) -> None:
    write(tmp_path, N_SAMPLES, compression=compression)
    writer = ShardWriter(s3.url, WriteOptions(3, compression=compression), store=s3.options)
    for number in range(stopped):
        writer.write(sample(number), None, {"number": number})
    writer.abandon()
    resumed = ShardWriter(s3.url, WriteOptions(3, compression=compression), resume=True, store=s3.options)
    assert resumed.written == stopped // 3 * 3
    resumed.abandon()
    write_to(s3, resume=True, compression=compression)
    assert contents(s3.folder) == contents(tmp_path)


def test_resuming_with_other_options_is_refused(s3: Endpoint) -> None:
    writer = ShardWriter(s3.url, WriteOptions(3), store=s3.options)
    writer.abandon()
    with pytest.raises(OptionError, match="resume=True needs the options"):
        write_to(s3, resume=True, shard_size=4)
    write_to(s3, shard_size=4)
    assert numbers(s3.folder) == list(range(N_SAMPLES))


def test_starting_over_removes_what_was_unfinished(s3: Endpoint, tmp_path: Path) -> None:
    writer = ShardWriter(s3.url, WriteOptions(1), store=s3.options)
    for number in range(5):
        writer.write(sample(number), None, None)
    writer.abandon()
    write(tmp_path, 2)
    write_to(s3, 2)
    assert contents(s3.folder) == contents(tmp_path)


_KILLS = """
import os, shutil, signal, sys
from pathlib import Path
import numpy as np
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.store import Store
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.writer import ShardWriter
from penstock_remote import s3_keys
from tests.shard.samples import contents, sample, numbers

url, folder, endpoint, overwrites = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "overwrite"
options = StoreOptions(endpoint, "us-east-1", credentials=s3_keys)

def in_child(function):
    pid = os.fork()
    if not pid:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def write(first, n_samples, **more):
    writer = ShardWriter(url, WriteOptions(3), store=options, **more)
    for number in range(first + writer.written, first + n_samples):
        writer.write(sample(number), None, {"number": number})
    writer.commit()

def write_until(n_calls, resume):
    calls = iter(range(1, 10_000))
    def dying(method):
        def call(*args, **more):
            if next(calls) == n_calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args, **more)
        return call
    for name in ("put", "remove", "put_file"):
        setattr(Store, name, dying(getattr(Store, name)))
    write(50, 5, overwrite=overwrites and not resume, resume=resume)

def visible():
    return numbers(folder) if (folder / "dataset_metadata.json").exists() else None

old = list(range(7)) if overwrites else None
n_calls, n_killed = -int(not overwrites), 0  # half of the requests of each case
while True:
    n_calls += 2
    if overwrites:
        assert in_child(lambda: write(0, 7, overwrite=True)) == 0
    else:
        shutil.rmtree(folder)
        folder.mkdir()
    code = in_child(lambda: write_until(n_calls, resume=False))
    new = list(range(50, 55))
    assert visible() in (old, new), (n_calls, visible())
    if code == 0:
        break
    assert code == -signal.SIGKILL, (n_calls, code)
    n_killed += 1
    if visible() == old:  # killed once more, while it resumes
        in_child(lambda: write_until(max(1, n_calls // 2), resume=True))
        assert visible() in (old, new), (n_calls, visible())
    begun = (folder / ".writing" / "options.json").exists() or visible() == new
    assert in_child(lambda: write(50, 5, overwrite=overwrites and not begun, resume=begun)) == 0, n_calls
    assert visible() == new, n_calls
    names = {name.replace("-", ".").split(".")[0] for name in contents(folder)}
    assert names == {"dataset_metadata", "shard_000000", "shard_000001"}, (n_calls, names)
    assert len(contents(folder)) == 5, (n_calls, sorted(contents(folder)))
print(n_killed)
"""


@pytest.mark.parametrize("case", ["fresh", "overwrite"])
def test_killed_at_a_request_a_reader_finds_the_old_or_the_new_and_resuming_completes_it(
    s3: Endpoint, tmp_path: Path, case: str
) -> None:
    script = tmp_path / "kills.py"
    script.write_text(_KILLS)
    here = Path(__file__).parents[3]
    paths = [str(here), str(here / "tests" / "parts"), *sys.path]
    found = subprocess.run(
        [sys.executable, str(script), str(s3.url), str(s3.folder), str(s3.options.endpoint), case],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) > 5


@pytest.mark.parametrize("more", [{"resume": True}, {"overwrite": True}, {}], ids=str)
@pytest.mark.parametrize("n_samples", [2, 4])
def test_of_two_writers_the_one_that_began_first_stops(s3: Endpoint, more: dict[str, Any], n_samples: int) -> None:
    first = ShardWriter(s3.url, WriteOptions(3), store=s3.options)
    first.write(sample(0), None, {"number": 0})
    second = ShardWriter(s3.url, WriteOptions(3), store=s3.options, **more)
    with pytest.raises(WriteError, match="Another writer is at work in s3://"):  # noqa: PT012
        for number in range(1, n_samples):
            first.write(sample(number), None, {"number": number})
        first.commit()
    first.abandon()
    for number in range(second.written, N_SAMPLES):
        second.write(sample(number), None, {"number": number})
    second.commit()
    assert numbers(s3.folder) == list(range(N_SAMPLES))


# -- a server that fails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({"kind": "status", "status": 500, "code": "InternalError"}, "the server answered 500"),
        ({"kind": "status", "status": 507, "code": "InsufficientStorage"}, "the server answered 507"),
        ({"kind": "status", "status": 400, "code": "ExpiredToken"}, "credentials have expired"),
        ({"kind": "status", "status": 403, "code": "AccessDenied"}, "the server answered 403"),
        ({"kind": "drop"}, "closed|reset"),
    ],
    ids=["500", "full", "expired", "refused", "dropped"],
)
@pytest.mark.parametrize("key", ["shard_000001.tar*", "dataset_metadata.json"])
def test_a_server_that_fails_is_a_write_error_and_resuming_continues(
    s3: Endpoint, tmp_path: Path, rule: dict[str, Any], reason: str, key: str
) -> None:
    write(tmp_path, N_SAMPLES)
    s3.break_requests({**rule, "method": "P*", "key": key})
    with pytest.raises(WriteError, match=reason) as caught:
        write_to(s3, options=hasty(s3))
    assert "resume=True" in str(caught.value)
    assert "penstocksecret" not in str(caught.value)
    assert not (s3.folder / "dataset_metadata.json").exists()
    s3.reset()
    write_to(s3, resume=True)
    assert contents(s3.folder) == contents(tmp_path)


def test_a_server_that_fails_at_times_is_asked_again(s3: Endpoint, tmp_path: Path) -> None:
    write(tmp_path, N_SAMPLES)
    s3.break_requests(
        {"kind": "status", "status": 503, "code": "SlowDown", "key": "*.tar", "times": 2},
        {"kind": "lost", "method": "PUT", "key": "*.index", "times": 1},
    )
    write_to(s3)
    assert contents(s3.folder) == contents(tmp_path)


def test_a_shard_that_somebody_removes_before_the_end_is_noticed(s3: Endpoint) -> None:
    writer = ShardWriter(s3.url, WriteOptions(3), store=s3.options)
    for number in range(N_SAMPLES):
        writer.write(sample(number), None, {"number": number})
    writer._place.shards.wait()
    (s3.folder / "shard_000001.tar").unlink()
    with pytest.raises(WriteError, match=r"shard_000001\.tar must have .* bytes .*Continue with resume=True"):
        writer.commit()
    write_to(s3, resume=True)
    assert numbers(s3.folder) == list(range(N_SAMPLES))


def test_a_url_that_cannot_be_reached_is_a_write_error(s3: Endpoint) -> None:
    nowhere = StoreOptions("http://127.0.0.1:9", "us-east-1", credentials=s3.options.credentials, retries=0)
    with pytest.raises(WriteError, match=r"Could not write to s3://.*connection refused"):
        write_to(s3, options=nowhere)


def test_options_of_a_store_are_refused_for_a_folder(tmp_path: Path, s3: Endpoint) -> None:
    with pytest.raises(OptionError, match="store needs a URL"):
        create_shards_from_arrays(tmp_path / "set", {"x": np.arange(3)}, store=s3.options)
    assert not (tmp_path / "set").exists()


def test_a_web_server_is_no_place_to_write_to() -> None:
    with pytest.raises(OptionError, match=r"must be written to a folder or a bucket.*got the web address https://"):
        WebDatasetWriter("https://example.org/train")
