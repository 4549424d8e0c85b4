"""Conversions from and to URLs: the shards of a local conversion."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_convert_parts import tapes, tree
from penstock_nwb_parts import add_units, new_file, save_nwb, series
from penstock_remote import Endpoint
from PIL import Image

from penstock import TarSource, convert_to_shards
from penstock.convert import ConvertOptions, ReadOptions, write_source
from penstock.convert.convert import convert
from penstock.convert.engines import LocalEngine
from penstock.convert.inputs.arrays import NpyInput
from penstock.convert.nwb.options import NWBOptions
from penstock.convert.splits import Split
from penstock.core.errors import ConversionError, OptionError, SourceError, WriteError
from penstock.files.spans.options import RemoteOptions
from penstock.files.stores.options import StoreOptions
from penstock.shard.outputs.write_options import WriteOptions
from penstock.source.combine import Renamed

WRITE = WriteOptions(5)


def inputs(folder: Path) -> list[NpyInput]:
    return [NpyInput(given.path) for given in tapes(folder, (7, 9))]


def shards(folder: Path) -> dict[str, bytes]:
    """Return the files of all shards: everything but the manifest, which names the inputs."""
    return {name: content for name, content in tree(folder).items() if ".tar" in name}


def interrupt_at(at: int) -> Any:
    def interrupt(phase: str, _unit: str, done: int, *_: Any) -> None:
        if phase == "Writing" and done >= at:
            raise KeyboardInterrupt

    return interrupt


# -- to a URL ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "options",
    [ConvertOptions(WRITE), ConvertOptions(WRITE, Split((("train", 0.5), ("val", 0.5)), "file"))],
    ids=["whole", "split"],
)
def test_a_conversion_to_a_url_has_the_bytes_of_a_local_one(
    s3: Endpoint, tmp_path: Path, options: ConvertOptions, workers: int
) -> None:
    given = inputs(tmp_path / "in")
    local = convert(given, tmp_path / "out", options)
    found = convert(given, s3.url, options, engine=LocalEngine(workers), store=s3.options)
    assert tree(s3.folder) == tree(tmp_path / "out")
    assert {name: one.fingerprint for name, one in found.items()} == {
        name: one.fingerprint for name, one in local.items()
    }


def test_an_interrupted_conversion_to_a_url_resumes(s3: Endpoint, tmp_path: Path) -> None:
    given, options = inputs(tmp_path / "in"), ConvertOptions(WRITE)
    convert(given, tmp_path / "out", options)
    for at in (0, 5, 10):
        with pytest.raises(KeyboardInterrupt):
            convert(given, s3.url, options, existing="resume", on_progress=interrupt_at(at), store=s3.options)
        assert not (s3.folder / "dataset_metadata.json").exists()
    with pytest.raises(WriteError, match="holds an unfinished conversion"):
        convert(given, s3.url, options, store=s3.options)
    convert(given, s3.url, options, existing="resume", store=s3.options)
    assert tree(s3.folder) == tree(tmp_path / "out")
    with pytest.raises(WriteError, match="holds a dataset already"):
        convert(given, s3.url, options, store=s3.options)
    convert(given, s3.url, options, existing="overwrite", store=s3.options)
    assert len(TarSource(s3.folder).index) == 16


def test_a_conversion_to_a_server_that_fails_resumes(s3: Endpoint, tmp_path: Path) -> None:
    given, options = inputs(tmp_path / "in"), ConvertOptions(WRITE)
    convert(given, tmp_path / "out", options)
    hasty = StoreOptions(s3.options.endpoint, "us-east-1", credentials=s3.options.credentials, retries=0)
    s3.break_requests({"kind": "status", "status": 500, "method": "P*", "key": "shard_000002.tar"})
    with pytest.raises(WriteError, match=r"shard_000002\.tar.*the server answered 500"):
        convert(given, s3.url, options, store=hasty)
    s3.reset()
    convert(given, s3.url, options, existing="resume", store=s3.options)
    assert tree(s3.folder) == tree(tmp_path / "out")


# -- from a URL --------------------------------------------------------------------------------------------------------


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """An NWB file of 24 MB, of which a conversion of the units needs a fraction."""
    nwb = new_file()
    rng = np.random.default_rng(0)
    add_units(nwb, [np.sort(rng.uniform(0, 20, 300)) for _ in range(5)])
    nwb.add_acquisition(series("raw", rng.normal(size=(20_000, 150)), rate=1000.0))
    path = tmp_path / "recordings" / "a.nwb"
    path.parent.mkdir()
    save_nwb(nwb, path)
    return path


def convert_nwb(where: Any, output: Path, **more: Any) -> dict[str, Any]:
    reading = ReadOptions(nwb=NWBOptions(modalities=("spikes",)), cache=more.pop("cache", None))
    return convert_to_shards(where, output, reading=reading, options=ConvertOptions(WRITE), show_progress=False, **more)


@pytest.mark.parametrize("kind", ["http", "s3"])
def test_an_nwb_file_at_a_url_is_read_by_ranges_and_gives_the_same_shards(
    recording: Path, http_files: Endpoint, s3: Endpoint, tmp_path: Path, kind: str
) -> None:
    server = http_files if kind == "http" else s3
    (server.folder / "a.nwb").write_bytes(recording.read_bytes())
    local = convert_nwb(recording, tmp_path / "local")
    found = convert_nwb(str(server.url / "a.nwb"), tmp_path / "out", store=server.options if kind == "s3" else None)
    assert shards(tmp_path / "out") == shards(tmp_path / "local")
    assert found["fingerprint"] == local["fingerprint"]
    about = found["metadata"]["conversion"]["inputs"][0]
    assert (about["file"], about["bytes"]) == ("a.nwb", recording.stat().st_size)
    assert server.n_bytes("GET", "a.nwb") < recording.stat().st_size / 2


def test_a_cache_folder_keeps_what_was_read_of_a_file(recording: Path, http_files: Endpoint, tmp_path: Path) -> None:
    (http_files.folder / "a.nwb").write_bytes(recording.read_bytes())
    for number in range(2):
        convert_nwb(str(http_files.url / "a.nwb"), tmp_path / f"out{number}", cache=tmp_path / "cache")
        if not number:
            http_files.reset_counts()
    assert http_files.n_bytes("GET", "a.nwb") == 0
    assert tree(tmp_path / "out0") == tree(tmp_path / "out1")


@pytest.mark.parametrize(
    ("pattern", "expected"), [("raw/*.npy", [0, 1]), ("raw/**/*.npy", [0, 1, 2]), ("raw/x/?.npy", [2])]
)
def test_patterns_of_a_bucket_are_expanded_in_alphabetical_order(
    s3: Endpoint, tmp_path: Path, pattern: str, expected: list[int]
) -> None:
    (s3.folder / "raw" / "x").mkdir(parents=True)
    for number, name in enumerate(("raw/a.npy", "raw/b.npy", "raw/x/c.npy", "raw/.hidden.npy", "other.npy")):
        np.save(s3.folder / name, np.full((3, 2), number))
    convert_to_shards(str(s3.url / pattern), tmp_path / "out", store=s3.options, show_progress=False)
    source = TarSource(tmp_path / "out")
    assert source.take(np.arange(len(source.index)))["data"][::3, 0].tolist() == expected


def test_arrays_audio_and_files_at_a_url_give_the_shards_of_local_ones(
    s3: Endpoint, http_files: Endpoint, tmp_path: Path
) -> None:
    soundfile = pytest.importorskip("soundfile")
    rng = np.random.default_rng(0)
    folder = tmp_path / "raw"
    folder.mkdir()
    np.save(folder / "a.npy", rng.normal(size=(40, 3)))
    np.savez(folder / "b.npz", x=np.arange(30).reshape(10, 3), y=np.arange(10))
    np.savez_compressed(folder / "c.npz", x=np.arange(30).reshape(10, 3), y=np.arange(10))
    for extension in ("wav", "flac", "ogg"):
        soundfile.write(folder / f"d.{extension}", rng.uniform(-0.5, 0.5, 40_000), 16_000)
    Image.fromarray(rng.integers(0, 255, (5, 4, 3), np.uint8)).save(folder / "e.png")
    for server in (s3, http_files):
        for path in folder.iterdir():
            (server.folder / path.name).write_bytes(path.read_bytes())
            local, out = tmp_path / "local" / path.name, tmp_path / server.url.scheme / path.name
            convert_to_shards(path, local, show_progress=False, overwrite=True)
            store = server.options if server is s3 else None
            convert_to_shards(str(server.url / path.name), out, show_progress=False, store=store)
            assert values(out) == values(local), path.name
            if path.suffix in (".npy", ".npz"):  # the metadata of the others have the name of their folder
                assert shards(out) == shards(local), path.name


def values(folder: Path) -> list[Any]:
    """Return the fields of all items; the metadata say in which folder a file was."""
    source = TarSource(folder)
    block = source.take(np.arange(len(source.index)))
    return [[np.asarray(item).tolist() for item in block[name]] for name in sorted(block) if name != "metadata"]


def test_shards_at_a_url_are_an_input(s3: Endpoint, tmp_path: Path) -> None:
    convert(inputs(tmp_path / "in"), s3.url / "set", ConvertOptions(WRITE), store=s3.options)
    convert_to_shards(str(s3.url / "set"), tmp_path / "again", store=s3.options, show_progress=False)
    convert_to_shards(s3.folder / "set", tmp_path / "local", show_progress=False)
    assert shards(tmp_path / "again") == shards(tmp_path / "local")


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_an_object_that_is_replaced_during_the_conversion_is_an_error(s3: Endpoint, tmp_path: Path) -> None:
    np.save(s3.folder / "a.npy", np.arange(20))

    def replace(phase: str, *_: Any) -> None:
        if phase == "Writing":
            np.save(s3.folder / "a.npy", np.arange(20) + 1)

    with pytest.raises(ConversionError, match=r"changed while it was converted|was replaced"):
        convert(
            [NpyInput(s3.url / "a.npy", remote=RemoteOptions(s3.options))],
            tmp_path / "out",
            ConvertOptions(WRITE),
            on_progress=replace,
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("http", "The web server does not list its files, got the pattern"),
        ("s3", "No object matches s3://bucket/"),
    ],
)
def test_patterns_that_match_nothing_say_so(
    s3: Endpoint, http_files: Endpoint, tmp_path: Path, given: str, message: str
) -> None:
    server = s3 if given == "s3" else http_files
    with pytest.raises(SourceError, match=message):
        convert_to_shards(
            str(server.url / "*.npy"), tmp_path / "out", store=s3.options if server is s3 else None, show_progress=False
        )


def test_an_object_that_is_missing_is_reported_with_all_others(http_files: Endpoint, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"a\.npy: .*there is no such object"):
        convert_to_shards(str(http_files.url / "a.npy"), tmp_path / "out", show_progress=False)


def test_options_for_urls_without_a_url_are_refused(s3: Endpoint, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    with pytest.raises(OptionError, match="Options of a store are for URLs, but neither"):
        convert_to_shards(tmp_path / "a.npy", tmp_path / "out", store=s3.options)
    with pytest.raises(OptionError, match="cache must be left out: it is for URLs"):
        convert_to_shards(tmp_path / "a.npy", tmp_path / "out", reading=ReadOptions(cache=tmp_path / "cache"))
    with pytest.raises(OptionError, match=r"A function reads files of this machine, got the URL s3://"):
        convert_to_shards("s3://bucket/a.npy", tmp_path / "out", format=lambda path: [])


# -- sources -----------------------------------------------------------------------------------------------------------


def test_a_source_at_a_url_is_written_to_a_url_as_a_local_one(s3: Endpoint, tmp_path: Path) -> None:
    convert(inputs(tmp_path / "in"), tmp_path / "whole", ConvertOptions(WRITE))
    whole, edited = s3.below("whole"), s3.below("edited")
    convert(inputs(tmp_path / "in"), whole.url, ConvertOptions(WRITE), store=s3.options)
    names = {next(iter(TarSource(tmp_path / "whole").fields)): "renamed"}
    local, remote = TarSource(tmp_path / "whole"), TarSource(str(whole.url), store=s3.options)
    how: dict[str, Any] = {"shard_size": 3, "show_progress": False}
    write_source(Renamed(local, names), tmp_path / "edited", **how)
    write_source(Renamed(remote, names), edited.url, store=s3.options, **how)
    assert shards(edited.folder) == shards(tmp_path / "edited")
    assert "renamed" in TarSource(edited.url, store=s3.options).fields
