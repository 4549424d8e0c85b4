"""WebDataset loaders over a URL: the batches and states of the folder that it is a copy of."""

import json
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import penstock_test_shards
import pytest
from penstock_remote import Endpoint
from penstock_test_shards import ORDERS, OURS, flat, ours
from penstock_webdataset_library import read_by_the_library, tars
from torch.utils.data import DataLoader

from penstock import Loader, RunOptions, TarSource, create_webdataset_dataloader
from penstock.recipes.webdataset import ShardedDatasetInfo, WebDatasetLoader
from penstock.shard.index_tars import index_archives

N, SHARD = 60, 13
no_launcher, sets = penstock_test_shards.no_launcher, penstock_test_shards.sets


@pytest.fixture(scope="module")
def local(sets: Callable[..., Path]) -> Path:
    return sets()


@pytest.fixture(scope="module")
def there(local: Path, s3_server: Endpoint) -> Endpoint:
    found = s3_server.below(f"{local.parent.name}-{local.name}")
    shutil.copytree(local, found.folder, dirs_exist_ok=True)
    return found


def read(loader: Loader, n_epochs: int = 2) -> list[Any]:
    with loader:
        return [flat(loader) for _ in range(n_epochs)]


@pytest.mark.parametrize(
    ("kind", "order"),
    [*(("no workers", order) for order in ORDERS), *((kind, "window") for kind in list(OURS)[1:])],
)
def test_batches_are_those_of_the_folder(kind: str, order: str, local: Path, there: Endpoint) -> None:
    options = ORDERS[order]
    assert read(ours(str(there.url), kind, store=there.options, **options)) == read(
        ours(local, "no workers", **options)
    )


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_worker_processes_may_start_in_any_way(start_method: Any, local: Path, there: Endpoint, tmp_path: Path) -> None:
    source = TarSource(str(there.url), store=there.options, cache=tmp_path, cache_bytes=1 << 24, fields=["x"])
    source.take(np.arange(3))  # the client of this process is in use
    dataset = WebDatasetLoader(local, fields=["x"])
    options = RunOptions(executor="processes", start_method=start_method)
    found = read(Loader(source, dataset.plan(4), num_workers=2, options=options), n_epochs=1)
    assert found == read(Loader(dataset.source, dataset.plan(4)), n_epochs=1)


@pytest.mark.parametrize("stop", [0, 1, 7, 15])
def test_a_state_of_the_folder_resumes_at_the_url_and_the_other_way_round(
    stop: int, local: Path, there: Endpoint
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 0, "buffer_size": 16, "pin_memory": False}

    def create(is_remote: bool) -> Loader:
        more = {"store": there.options} if is_remote else {}
        return create_webdataset_dataloader(str(there.url) if is_remote else local, **options, **more)

    with create(False) as whole:
        wanted = flat(whole)
    for is_remote in (False, True):
        with create(is_remote) as before:
            first = flat(islice(before, stop))
            state = json.loads(json.dumps(before.state_dict()))
        with create(not is_remote) as after:
            after.load_state_dict(state)
            rest = flat(after) if stop < len(whole) else []
        assert first + rest == wanted


def test_a_sample_loader_resumes_at_the_url(local: Path, there: Endpoint) -> None:
    wanted = [int(sample["x"]) for sample in WebDatasetLoader(local)]
    before = WebDatasetLoader(local)
    first = [int(sample["x"]) for sample in islice(before, 11)]
    after = WebDatasetLoader(str(there.url), store=there.options, max_workers=2)
    after.set_state(before.get_state())
    assert first + [int(sample["x"]) for sample in after] == wanted
    before.close()
    after.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torch_reads_from_a_url_with_its_own_workers(num_workers: int, local: Path, there: Endpoint) -> None:
    found = WebDatasetLoader(str(there.url), store=there.options, shuffle=False)
    next(iter(found))
    found.close()
    found = WebDatasetLoader(str(there.url), store=there.options, shuffle=False)
    with_workers = DataLoader(found, batch_size=None, num_workers=num_workers)
    assert sorted(int(sample["x"]) for sample in with_workers) == list(range(N))


def test_a_pattern_of_shards_at_a_url(local: Path, there: Endpoint) -> None:
    options = {"shuffle": False, "shard_pattern": "shard_00000[13].tar"}
    found = [int(sample["x"]) for sample in WebDatasetLoader(str(there.url), store=there.options, **options)]
    assert found == [*range(13, 26), *range(39, 52)]


def test_the_summary_of_a_url(local: Path, there: Endpoint) -> None:
    wanted = ShardedDatasetInfo(local).get_summary()
    assert ShardedDatasetInfo(str(there.url), store=there.options).get_summary() == wanted
    (there.folder / "shard_000004.tar").rename(there.folder / "gone")
    try:
        info = ShardedDatasetInfo(str(there.url), store=there.options)
        assert info.problems() == ["shard_000004.tar is missing"]
    finally:
        (there.folder / "gone").rename(there.folder / "shard_000004.tar")


def test_tars_of_the_webdataset_library_from_a_web_server(tmp_path: Path, http_files: Endpoint) -> None:
    import webdataset as wds

    web = http_files.below(tmp_path.name)
    with wds.ShardWriter(str(web.folder / "train-%06d.tar"), maxcount=4, verbose=0) as writer:
        for number in range(10):
            writer.write(
                {"__key__": f"item{number:03d}", "cls": number, "json": {"number": number, "text": "ä" * number}}
            )
    wanted = read_by_the_library(tars(web.folder))
    pattern = str(web.url / "train-{000000..000002}.tar")
    manifest, problems = index_archives(pattern, output=tmp_path / "index")
    assert problems == []
    assert manifest is not None
    loader = WebDatasetLoader(tmp_path / "index", shuffle=False)
    found = list(loader)
    assert [sample["__key__"] for sample in found] == [sample["__key__"] for sample in wanted]
    assert [(int(sample["cls"]), sample["json"]) for sample in found] == [
        (sample["cls"], sample["json"]) for sample in wanted
    ]
    assert str(loader.source.url) == str(web.url)
