"""`verify` and `index` of archives at a URL find what they find in a folder, and say the same."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_remote import Endpoint
from penstock_test_shards import archive, flip, npy, uniform, write

from penstock import OptionError, SourceError, TarSource, WriteError
from penstock.files.spans.remote_folder import RemoteFolder, RemoteOptions
from penstock.shard.index_tars import index_archives
from penstock.shard.places.archives import find_archives, open_object
from penstock.shard.verify import verify_shards


@pytest.fixture
def there(s3: Endpoint, tmp_path: Path) -> Endpoint:
    return s3.below(tmp_path.name)


def write_tars(folder: Path, n_shards: int = 3) -> None:
    """Write archives of 4 items each; x is the number of the item."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(n_shards):
        samples = [{"x.npy": npy(np.int64(4 * shard + row)), "txt": b"%d" % row} for row in range(4)]
        archive(folder / f"train-{shard:06d}.tar", samples, first=4 * shard)


def find(where: Any, **options: Any) -> list[str]:
    return [str(problem) for problem in verify_shards(where, **options)[1]]


@pytest.mark.parametrize("compression", ["none", "gz"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_healthy_copy_has_no_problems(compression: str, workers: int, there: Endpoint) -> None:
    write(there.folder, uniform(0), compression=compression)
    there.reset_counts()
    done: list[int] = []
    manifest, problems = verify_shards(str(there.url), workers=workers, progress=done.append, store=there.options)
    assert problems == []
    assert manifest.n_items == 23
    sizes = [path.stat().st_size for path in sorted(there.folder.glob("*.tar*")) if path.suffix != ".index"]
    assert sorted(done) == sorted(sizes)
    assert sum(there.n_bytes(key=shard.name) for shard in manifest.shards) == sum(sizes), "each byte is read once"


def test_problems_are_those_of_the_folder(there: Endpoint, tmp_path: Path) -> None:
    write(there.folder, uniform(0))
    flip(there.folder / "shard_000001.tar", 5000)
    (there.folder / "shard_000002.tar").write_bytes((there.folder / "shard_000002.tar").read_bytes()[:-512])
    shutil.copy(there.folder / "shard_000000.tar", there.folder / "shard_000009.tar")
    wanted = find(there.folder)
    assert len(wanted) == 4
    assert find(str(there.url), store=there.options) == wanted


def test_a_shard_that_is_missing_is_a_problem(there: Endpoint) -> None:
    write(there.folder, uniform(0))
    (there.folder / "shard_000001.tar").unlink()
    (there.folder / "shard_000003.tar.index").unlink()
    found = find(str(there.url), store=there.options)
    assert len(found) == 2
    assert found[0].startswith("shard_000001.tar: it cannot be read")
    assert found[1].startswith("shard_000003.tar: its side index shard_000003.tar.index cannot be read")


@pytest.mark.parametrize("pattern", ["", "train-{000000..000002}.tar", "train-*.tar"])
def test_an_index_is_uploaded_beside_the_archives(pattern: str, there: Endpoint, tmp_path: Path) -> None:
    write_tars(there.folder)
    write_tars(tmp_path / "tars")
    where = str(there.url / pattern) if pattern else str(there.url)
    done: list[int] = []
    manifest, problems = index_archives(where, store=there.options, progress=done.append, workers=2)
    assert problems == []
    assert manifest is not None
    assert sum(done) == sum(path.stat().st_size for path in there.folder.glob("*.tar"))
    local, _ = index_archives(tmp_path / "tars" / pattern)
    assert local is not None
    assert sorted(path.name for path in there.folder.iterdir()) == sorted(
        path.name for path in (tmp_path / "tars").iterdir()
    )
    for path in (tmp_path / "tars").iterdir():
        assert (there.folder / path.name).read_bytes() == path.read_bytes(), path.name
    source = TarSource(where, store=there.options)
    assert source.take(np.arange(12)[::-1])["x"].tolist() == list(range(12))[::-1]
    assert index_archives(where, store=there.options)[1] == [], "again"


def test_problems_of_archives_are_those_of_the_folder_and_nothing_is_written(there: Endpoint) -> None:
    write_tars(there.folder)
    archive(there.folder / "train-000001.tar", [{"x.npy": npy(np.int64(0))}])
    wanted = index_archives(there.folder)
    assert len(wanted[1]) == 1
    assert index_archives(str(there.url), store=there.options) == wanted
    assert not list(there.folder.glob("*.index"))


def test_an_index_is_kept_on_this_machine(http_files: Endpoint, tmp_path: Path) -> None:
    web = http_files.below(tmp_path.name)
    write_tars(web.folder)
    where, index = str(web.url / "train-{000000..000002}.tar"), tmp_path / "index"
    with pytest.raises(WriteError, match="name a folder with output="):
        index_archives(where)
    manifest, problems = index_archives(where, output=index)
    assert problems == []
    assert manifest is not None
    assert {path.suffix for path in web.folder.iterdir()} == {".tar"}
    source = TarSource(index)
    assert source.take(np.array([9, 2]))["x"].tolist() == [9, 2]
    assert source.manifest.fingerprint == manifest.fingerprint
    assert find(index) == []
    flip(web.folder / "train-000001.tar", 700)
    assert [problem.partition(": ")[0] for problem in find(index)] == ["train-000001.tar, item 4"]
    assert index_archives(where, output=index)[1] == [], "again"
    other = http_files.below(f"{tmp_path.name}-other")
    write_tars(other.folder)
    with pytest.raises(SourceError, match=f"has the index of {web.url}. Use another folder"):
        index_archives(str(other.url / "train-000000.tar"), output=index)


def test_a_server_that_lists_nothing_needs_a_pattern(http_files: Endpoint, tmp_path: Path) -> None:
    web = http_files.below(tmp_path.name)
    write_tars(web.folder)
    with pytest.raises(SourceError, match=r"lists no files.*NAME-\{000000\.\.000009\}\.tar"):
        find_archives(str(web.url))
    with pytest.raises(SourceError, match=r"All archives of .* must exist"):
        find_archives(str(web.url / "train-{000000..000009}.tar"))


def test_a_folder_of_archives_has_its_index_beside_them(tmp_path: Path) -> None:
    write_tars(tmp_path / "tars")
    with pytest.raises(OptionError, match="output is for the index of a URL"):
        index_archives(tmp_path / "tars", output=tmp_path / "index")


def test_a_dataset_that_penstock_wrote_is_not_indexed_again(there: Endpoint) -> None:
    write(there.folder, uniform(0))
    with pytest.raises(SourceError, match="was written by Penstock and already has an index"):
        index_archives(str(there.url), store=there.options)


def test_an_object_is_read_from_front_to_back(there: Endpoint) -> None:
    content = np.arange(3 << 20, dtype=np.uint32).tobytes()
    (there.folder / "large").write_bytes(content)
    folder = RemoteFolder(there.url, RemoteOptions(there.options))
    there.reset_counts()
    with open_object(folder, "large", len(content)) as file:
        assert file.peek(8)[:8] == content[:8]
        parts = [file.read(1), file.read(5_000_000), file.read(7), file.read()]
    assert b"".join(parts) == content
    assert there.n_bytes(key="large") == len(content)
