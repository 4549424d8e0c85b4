"""URLs that hold a secret are refused wherever a URL can be given, and no text quotes the secret."""

import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import penstock as ps
from penstock.cli.main import app
from penstock.convert import convert_to_shards, inputs_of, write_source
from penstock.observe.tuning import Tuning
from penstock.recipes.cellmap.multi import open_plate
from penstock.recipes.chunked import QuantizedAudioDataset
from penstock.recipes.crossval import cross_val_training
from penstock.recipes.streams import SimulationWriter
from penstock.shard.index_tars import index_archives
from penstock.source.lengths import item_lengths
from penstock.source.tar.quarantine import Quarantine

SECRET = "s3cret"
FORMS = [
    f"http://user:{SECRET}@127.0.0.1:9/x",
    f"HTTPS://{SECRET}@127.0.0.1:9/x",
    f"http:/user:{SECRET}@127.0.0.1:9/x",
    f"http://user:pass/{SECRET}@127.0.0.1:9/x",
    f"https://127.0.0.1:9/x?X-Amz-Signature={SECRET}",
    f"http://127.0.0.1:9/x.tar?token={SECRET}",
    f"http://127.0.0.1:9/x.nwb#{SECRET}",
    f"s3://key:{SECRET}@bucket/x",
    f"s3://key:pass/{SECRET}@bucket/x",
    f"s3://bucket/x.zarr?X-Amz-Credential=a&X-Amz-Signature={SECRET}",
    f"gs://bucket/x.csv?sig={SECRET}",
    f"az://container/x.npy?sv=1&sig={SECRET}",
    f"abfs://container:{SECRET}@account/x",
    f"sftp://user:{SECRET}@host/x",
    f"file:///tmp/x?token={SECRET}",
]


def run(*arguments: str) -> None:
    """Run a command, and raise an error with what it prints."""
    found = CliRunner().invoke(app, list(arguments))
    raise RuntimeError(f"{found.exit_code} {found.output} {found.exception!r}")


SCALES = {"raw": {"shape": [1, 1, 1], "scale": [1, 1, 1]}}
DOORS: dict[str, Callable[[str], Any]] = {
    "open": ps.open,
    "TarSource": ps.TarSource,
    "ZarrSource": ps.ZarrSource,
    "ZarrSource.fields": lambda url: ps.ZarrSource("x.zarr", [url]),
    "AudioSource": ps.AudioSource,
    "AudioSource of a list": lambda url: ps.AudioSource([url]),
    "TableSource": ps.TableSource,
    "TableSource of a list": lambda url: ps.TableSource([url]),
    "FilesSource": ps.FilesSource,
    "FilesSource.root": lambda url: ps.FilesSource(pa.table({"path": ["x"]}), root=url),
    "FilesSource of a column": lambda url: ps.FilesSource(pa.table({"path": [url]})),
    "FolderSource": ps.FolderSource,
    "WebDatasetLoader": ps.WebDatasetLoader,
    "create_webdataset_dataloader": lambda url: ps.create_webdataset_dataloader(url, batch_size=1),
    "create_zarr_loader": lambda url: ps.create_zarr_loader(url, 0, 0, 1),
    "load_metadata": ps.load_metadata,
    "CellMapDataset": lambda url: ps.CellMapDataset(url, None, [], SCALES),
    "open_plate": lambda url: open_plate(url, None, SCALES),
    "WebDatasetWriter": ps.WebDatasetWriter,
    "create_shards_from_arrays": lambda url: ps.create_shards_from_arrays(url, {"x": np.zeros(2)}),
    "convert_to_shards": lambda url: convert_to_shards(url, "out"),
    "convert_to_shards.output": lambda url: convert_to_shards(["x.npy"], url),
    "write_source": lambda url: write_source(ps.TarSource(url), "out"),
    "inputs_of": lambda url: inputs_of([url]),
    "index_archives": index_archives,
    "QuantizedAudioDataset": QuantizedAudioDataset,
    "cross_val_training": lambda url: cross_val_training(data_path=url),
    "Tuning.load": Tuning.load,
    "SimulationWriter": lambda url: SimulationWriter(url, np.zeros((2, 5), np.float32), 1),
    "Quarantine": lambda url: Quarantine(url, "", 1),
    "item_lengths": lambda url: item_lengths(ps.ArraySource({"x": np.zeros(2)}), [1, 1], cache=url),
    "cache": lambda url: ps.TarSource("s3://bucket/x", cache=url),
    "endpoint": lambda url: ps.StoreOptions(endpoint=url),
    "write_report": lambda url: ps.write_report("out.html", dataset=url),
    "doctor": ps.observe.examine,
    "penstock convert": lambda url: run("convert", url, "--output", "out"),
    "penstock convert --output": lambda url: run("convert", "x.npy", "--output", url),
    "penstock index": lambda url: run("index", url),
    "penstock inspect": lambda url: run("inspect", url),
    "penstock check --all": lambda url: run("check", url, "--all"),
    "penstock convert --where": lambda url: run("convert", url, "--output", "out", "--where", "x > 1"),
    "penstock tune": lambda url: run("tune", url),
    "penstock inspect --page": lambda url: run("inspect", url, "--page", "out.html"),
    "penstock check": lambda url: run("check", url),
    "penstock check --endpoint": lambda url: run("check", "s3://bucket/x", "--endpoint", url),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_secret_in_a_url_is_quoted_nowhere(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG)
    quoted = []
    for form in FORMS:
        try:
            found = repr(DOORS[door](form))
        except Exception as error:
            found = "".join(traceback.format_exception(error))
        if "A URL must" not in found or SECRET in found + caplog.text:
            quoted.append((form, found.splitlines()[-1]))
        caplog.clear()
    assert quoted == []
    assert not any(SECRET in str(path) for path in tmp_path.rglob("*"))
