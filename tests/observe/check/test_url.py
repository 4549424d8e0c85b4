"""What `penstock check URL` finds: the server, the shards, the arrays; and that it ends when nobody answers."""

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from penstock_remote import Endpoint
from penstock_test_shards import uniform, write

from penstock.core.errors import OptionError
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url
from penstock.observe import Finding, examine
from penstock.observe.check.url import examine_url


def look(url: Url, store: StoreOptions | None) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine_url(url, store, lambda *_: None)}


@pytest.fixture
def there(s3: Endpoint, tmp_path: Path) -> Endpoint:
    write(tmp_path / "shards", uniform(0))
    shutil.copytree(tmp_path / "shards", s3.folder / "set")
    return s3


def test_a_dataset_that_is_whole(there: Endpoint) -> None:
    found = look(there.url / "set", there.options)
    assert {check: finding.level for check, finding in found.items()} == {
        "storage.requests": "ok",
        "data.manifest": "ok",
        "data.shards": "ok",
    }
    assert found["data.manifest"].text.startswith("23 items in 6 shards")
    assert found["storage.requests"].facts["bytes_per_second"] > 0


@pytest.mark.parametrize(
    ("damage", "check", "message"),
    [
        (lambda folder: (folder / "shard_000003.tar").unlink(), "data.shards", r"shard_000003.tar is missing"),
        (
            lambda folder: (folder / "dataset_metadata.json").write_bytes(b'{"format": "penstock-shards"'),
            "data.manifest",
            "dataset_metadata.json",
        ),
        (lambda folder: (folder / "dataset_metadata.json").unlink(), "data.kind", "No manifest dataset_metadata.json"),
    ],
    ids=["shard", "manifest", "no manifest"],
)
def test_what_is_broken_is_a_problem(there: Endpoint, damage: Any, check: str, message: str) -> None:
    damage(there.folder / "set")
    found = look(there.url / "set", there.options)
    assert found[check].level == "problem"
    assert message in found[check].text


def test_arrays_of_a_zarr_store_are_opened(there: Endpoint) -> None:
    zarr.create_group(there.folder / "a.zarr").create_array("x", data=np.zeros((4, 2)))
    found = look(there.url / "a.zarr", there.options)
    assert found["data.store"].text == "A zarr store of 1 array; can be opened: x float64 (4, 2)."


def test_a_server_that_is_down_or_refuses_is_said_in_time(there: Endpoint) -> None:
    wrong = replace(there.options, credentials=lambda: {"access_key_id": "a", "secret_access_key": "b"})
    assert "403" in look(there.url / "set", wrong)["storage.requests"].text
    nobody = StoreOptions(endpoint="http://127.0.0.1:9", region="us-east-1", anonymous=True, deadline_seconds=2)
    began = time.monotonic()
    found = look(Url("s3://bucket/set"), nobody)["storage.requests"]
    assert (found.level, "connection refused" in found.text) == ("problem", True)
    assert time.monotonic() - began < 60


def test_options_of_a_store_need_a_url(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="store is for URLs"):
        examine(tmp_path, store=StoreOptions(anonymous=True))
