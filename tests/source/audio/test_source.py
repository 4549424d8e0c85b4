"""Windows of audio files: their frames and rate, and errors for files that have changed."""

import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from penstock_cases import few_cases
from penstock_source_suite import Case, SourceSuite
from penstock_test_parts import open_files, read_answer, start_script
from scipy.signal import resample_poly

from penstock import Loader, Plan, Sequential, WindowShuffle
from penstock.core.errors import OptionError, ReadError, SourceError
from penstock.source.audio import source as audio
from penstock.source.audio.file import AudioFile
from penstock.source.audio.source import AudioSource

FORMATS = ["wav", "flac", "ogg", "mp3"]
LOSSY = (".ogg", ".mp3")


def counted(path: Path, n_frames: int, first: int = 0, *, rate: int = 8000, channels: int = 1) -> NDArray[np.float32]:
    """Write a file with a distinct value per frame (approximate in ogg and mp3); return its content."""
    frames = first + np.arange(n_frames, dtype=np.int16)[:, np.newaxis] + 10_000 * np.arange(channels, dtype=np.int16)
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, frames.astype(np.int16), rate, **({} if path.suffix in LOSSY else {"subtype": "PCM_16"}))
    whole, _ = soundfile.read(path, dtype="float32", always_2d=True)
    assert whole.shape == frames.shape
    assert path.suffix in LOSSY or (whole * 2**15 == frames).all()
    return whole


def mean(whole: NDArray[np.float32]) -> NDArray[np.float32]:
    return whole.astype(np.float64).mean(axis=1, keepdims=True).astype(np.float32)


def cut(whole: NDArray[np.float32], length: int, *, drop: bool = False) -> list[NDArray[np.float32]]:
    """Cut the whole file into windows, the naive way."""
    found = [whole[start : start + length] for start in range(0, len(whole), length)]
    return [window for window in found if len(window) == length or not drop]


def taken(source: AudioSource, items: Any) -> list[NDArray[np.float32]]:
    return list(source.take(np.array(items))["audio"])


def same(found: list[NDArray[np.float32]], wanted: list[NDArray[np.float32]]) -> bool:
    assert all(array.dtype == np.float32 for array in found)
    return [array.tolist() for array in found] == [array.tolist() for array in wanted]


class TestAudio(SourceSuite):
    @pytest.fixture(params=["wav short", "flac drop", "ogg stereo", "mixed whole"])
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> Case:
        kind, what = request.param.split()
        names = [f"{n}.{kind if kind != 'mixed' else FORMATS[n % 4]}" for n in range(6)]
        lengths = (410, 300, 700, 99, 100, 101)
        channels = 2 if what == "stereo" else 1
        wholes = [counted(tmp_path / name, n, channels=channels) for name, n in zip(names, lengths, strict=True)]
        if what == "whole":
            options: dict[str, Any] = {}
            items = wholes
        else:
            options = {"window_frames": 100, "tail": "drop" if what == "drop" else "short"}
            items = [item for whole in wholes for item in cut(whole, 100, drop=what == "drop")]
        if what == "stereo":
            options["channels"] = "keep"
        paths = [tmp_path / name for name in names]
        return Case(
            lambda: AudioSource(paths, **options, open_files=2),
            lambda item: {"audio": items[item]},
            len(items),
            other=lambda: AudioSource(paths[:2], **options),
        )


# -- which frames ------------------------------------------------------------------------------------------------------


@few_cases
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 40),
    tail=st.sampled_from(["short", "drop"]),
    data=st.data(),
)
def test_items_are_the_windows_of_each_file(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], window: int | None, tail: Any, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "cut"
    paths = [folder / f"{n}.wav" for n in range(len(lengths))]
    wholes = [counted(path, n, 100 * k) for k, (path, n) in enumerate(zip(paths, lengths, strict=True))]
    by_file = [[whole] if window is None else cut(whole, window, drop=tail == "drop") for whole in wholes]
    items = [(file, item) for file, found in enumerate(by_file) for item in found]
    if not items:
        with pytest.raises(SourceError, match=rf"the longest of {len(lengths)}, .*{max(lengths)}\. "):
            AudioSource(paths, window_frames=window, tail=tail)
        return
    source = AudioSource(paths, window_frames=window, tail=tail)
    sizes = source.index.chunk_sizes(np.arange(source.index.n_chunks))
    assert sizes.tolist() == [len(found) for found in by_file if found], "a chunk is a file"
    shapes = {item.shape for _, item in items}
    assert source.fields["audio"].shape == (shapes.pop() if len(shapes) == 1 else None)
    numbers = data.draw(st.lists(st.integers(0, len(items) - 1), max_size=8))
    assert same(taken(source, np.array(numbers, np.int64)), [items[n][1] for n in numbers])
    files, starts, stops = source.windows(np.arange(len(items)))
    assert files.tolist() == [file for file, _ in items]
    for (file, item), start, stop in zip(items, starts, stops, strict=True):
        assert (wholes[file][start:stop] == item).all()
        assert stop - start == len(item)
    source.close()


@pytest.mark.parametrize("extension", FORMATS)
@pytest.mark.parametrize("rate", [16_000, 3_000])
@pytest.mark.parametrize("window", [None, 333])
def test_resampled_windows_are_slices_of_the_whole_resampled_file(tmp_path, extension, rate, window):
    wholes = [counted(tmp_path / f"{n}.{extension}", n, channels=2) for n in (2000, 1501)]
    source = AudioSource(tmp_path, window_frames=window, rate_hz=rate)
    expected = [resample_poly(mean(whole).astype(np.float64), rate // 1000, 8, axis=0) for whole in wholes[::-1]]
    items = [item for whole in expected for item in ([whole] if window is None else cut(whole, window))]
    found = taken(source, np.arange(len(source.index)))
    assert len(found) == len(items)
    for a, b in zip(found, items, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-7)
    joined = taken(AudioSource(tmp_path, rate_hz=rate), [0, 1])
    assert same(found, [item for whole in joined for item in ([whole] if window is None else cut(whole, window))])
    source.close()


def test_channels_are_kept_or_become_their_mean(tmp_path):
    three, one = counted(tmp_path / "3.wav", 50, channels=3), counted(tmp_path / "1.wav", 50)
    source = AudioSource(tmp_path, channels="keep")
    assert source.fields["audio"].shape is None, "the files differ in their channels"
    assert same(taken(source, [1, 0]), [three, one])
    assert AudioSource([tmp_path / "3.wav"], window_frames=25, channels="keep").fields["audio"].shape == (25, 3)
    source = AudioSource(tmp_path)
    assert source.fields["audio"].shape == (50, 1)
    assert same(taken(source, [1, 0]), [mean(three), one])


def test_files_of_different_rates_need_one(tmp_path):
    counted(tmp_path / "a.wav", 800, rate=8000)
    whole = counted(tmp_path / "b.flac", 800, rate=4000)
    with pytest.raises(SourceError, match=r"a\.wav has 8000 Hz, .*b\.flac has 4000 Hz\. .*rate_hz"):
        AudioSource(tmp_path)
    source = AudioSource(tmp_path, rate_hz=4000)
    assert [len(item) for item in taken(source, [0, 1])] == [400, 800]
    assert same(taken(source, [1]), [whole])
    assert source.rate_hz == 4000


def test_a_folder_and_a_single_file_can_be_given(tmp_path):
    whole = counted(tmp_path / "deep" / "b.wav", 10, 100)
    counted(tmp_path / "a.flac", 10)
    assert AudioSource(tmp_path).files == (str(tmp_path / "a.flac"), str(tmp_path / "deep" / "b.wav"))
    assert same(taken(AudioSource(str(tmp_path / "deep" / "b.wav")), [0]), [whole])


@pytest.mark.parametrize("extension", FORMATS)
def test_the_returned_arrays_belong_to_the_caller(tmp_path, extension):
    items = cut(counted(tmp_path / f"a.{extension}", 35), 10)
    source = AudioSource(tmp_path, window_frames=10)
    for _ in range(2):
        found = taken(source, [1, 1, 3])
        assert same(found, [items[1], items[1], items[3]])
        found[0][:] = 7
        assert same(found[1:], [items[1], items[3]])
        found[1][:] = found[2][:] = 7


# -- what is decoded ---------------------------------------------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Records the frames decoded, by file; -1 when a file is opened."""
    asked: list[tuple[str, int, int]] = []

    class Noting(AudioFile):
        def __init__(self, path: Path, **options: Any) -> None:
            self._name = path.name
            super().__init__(path, **options)
            asked.append((self._name, -1, -1))

        def __getitem__(self, frames: slice) -> Any:
            asked.append((self._name, frames.start, frames.stop))
            return super().__getitem__(frames)

    monkeypatch.setattr(audio, "AudioFile", Noting)
    return asked


@pytest.mark.parametrize("extension", ["wav", "flac"])
def test_a_window_is_found_by_seeking_and_decodes_only_its_own_frames(tmp_path, decoded, extension):
    counted(tmp_path / f"a.{extension}", 5000)
    source = AudioSource(tmp_path, window_frames=100)
    decoded.clear()
    taken(source, [30, 7, 30])
    name = f"a.{extension}"
    assert decoded == [(name, -1, -1), (name, 700, 800), (name, 3000, 3100)]


@pytest.mark.parametrize("rate", [None, 16_000])
@pytest.mark.parametrize("order", [Sequential(), WindowShuffle(window=1)], ids=["sequential", "window"])
def test_an_epoch_over_ogg_files_decodes_each_of_them_once(tmp_path, decoded, rate, order):
    wholes = [counted(tmp_path / f"{n}.ogg", 20_000 + n) for n in range(3)]
    source = AudioSource(tmp_path, window_frames=500, rate_hz=rate)
    decoded.clear()
    with Loader(source, Plan(source.index, order, batch_size=7, tail="short"), collate=list) as loader:
        found = [item["audio"] for batch in loader for item in batch]
    assert len(found) == len(source.index)
    assert sorted(call for call in decoded if call[1] >= 0) == [(f"{n}.ogg", 0, 20_000 + n) for n in range(3)]
    assert len(decoded) == 6, "and opened once"
    if rate is None:
        items = [item.tobytes() for whole in wholes for item in cut(whole, 500)]
        assert sorted(item.tobytes() for item in found) == sorted(items)


# -- files -------------------------------------------------------------------------------------------------------------


def of(folder: Path) -> list[str]:
    return [name for name in open_files().values() if name.startswith(str(folder))]


def test_few_files_stay_open_and_none_after_closing(tmp_path):
    wholes = [counted(tmp_path / f"{n}.wav", 40, 100 * n) for n in range(6)]
    source = AudioSource(tmp_path, window_frames=10, open_files=2)
    assert of(tmp_path) == []
    assert same(taken(source, np.arange(24)), [item for whole in wholes for item in cut(whole, 10)])
    assert sorted(of(tmp_path)) == [str(tmp_path / "4.wav"), str(tmp_path / "5.wav")]
    taken(source, [0, 23])
    assert sorted(of(tmp_path)) == [str(tmp_path / "0.wav"), str(tmp_path / "5.wav")]
    again = pickle.loads(pickle.dumps(source))
    source.close()
    assert of(tmp_path) == []
    taken(again, [3])
    del again
    assert of(tmp_path) == []


def test_threads_that_read_one_file_each_have_their_own_handle(tmp_path):
    items = cut(counted(tmp_path / "a.ogg", 30_000), 300)
    source = AudioSource(tmp_path, window_frames=300, open_files=3)
    together, wrong = threading.Barrier(4), list[int]()

    def read(number: int) -> None:
        together.wait(120)
        for n in np.random.default_rng(number).integers(0, 100, 12).tolist():
            if not same(taken(source, [n]), [items[n]]):
                wrong.append(n)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert 1 <= len(of(tmp_path)) <= 3
    source.close()
    assert of(tmp_path) == []


FORK = """
import json, os, sys
import numpy as np
from penstock.source.audio.source import AudioSource

source = AudioSource(sys.argv[1], window_frames=10)
values = lambda items: [(item[:, 0] * 2**15).astype(int).tolist() for item in source.take(np.array(items))["audio"]]
found, (reader, writer) = [values([0])], os.pipe()
child = os.fork()
if not child:
    os.write(writer, json.dumps(values([3, 1])).encode())
    os._exit(0)
found.append(values([1]))
os.waitpid(child, 0)
found.append(values([2]))
print(json.dumps([found, json.loads(os.read(reader, 10_000))]))
"""


def test_a_fork_in_the_middle_opens_its_own_files(tmp_path):
    (tmp_path / "set").mkdir()
    counted(tmp_path / "set" / "a.wav", 40)
    with start_script(tmp_path, FORK, str(tmp_path / "set"), env={"OPENBLAS_NUM_THREADS": "1"}) as process:
        found, in_child = read_answer(process)
    assert found == [[[*range(10)]], [[*range(10, 20)]], [[*range(20, 30)]]]
    assert in_child == [[*range(30, 40)], [*range(10, 20)]]


# -- identity ----------------------------------------------------------------------------------------------------------


def test_the_identity_depends_on_the_files_and_options_but_not_on_the_folder(tmp_path):
    for name in ("a/1.wav", "b/1.wav"):
        counted(tmp_path / "here" / name, 50)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    digest = AudioSource(tmp_path / "here", window_frames=10).index.digest
    assert AudioSource(tmp_path / "there", window_frames=10).index.digest == digest
    paths = [tmp_path / "here" / "b" / "1.wav", tmp_path / "here" / "a" / "1.wav"]
    others = [
        AudioSource(paths, window_frames=10),
        AudioSource(tmp_path / "here", window_frames=10, channels="keep"),
        AudioSource(tmp_path / "here", window_frames=10, tail="drop"),
        AudioSource(tmp_path / "here", window_frames=20, rate_hz=16_000),
    ]
    counted(tmp_path / "there" / "b" / "1.wav", 49)
    others.append(AudioSource(tmp_path / "there", window_frames=10))
    (tmp_path / "there" / "b" / "1.wav").rename(tmp_path / "there" / "b" / "2.wav")
    others.append(AudioSource(tmp_path / "there", window_frames=10))
    assert len({digest, *(other.index.digest for other in others)}) == 7


# -- what is broken ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extension", FORMATS)
def test_a_truncated_file_is_refused_by_name(tmp_path, extension):
    counted(tmp_path / f"good.{extension}", 3000)
    whole = (tmp_path / f"good.{extension}").read_bytes()
    bad = tmp_path / f"bad.{extension}"
    for cut_at in [0, 11, 60, *range(100, len(whole), len(whole) // 7), len(whole) - 1]:
        bad.write_bytes(whole[:cut_at])
        with pytest.raises((SourceError, ReadError), match=rf"bad\.{extension}"):
            AudioSource(tmp_path, window_frames=100)


@pytest.mark.parametrize("change", ["gone", "longer", "shorter", "rate", "text"])
def test_a_file_that_was_replaced_is_a_read_error(tmp_path, change):
    counted(tmp_path / "a.wav", 100)
    source = AudioSource(tmp_path, window_frames=10)
    path = tmp_path / "a.wav"
    path.unlink()
    changes: dict[str, Callable[[], Any]] = {
        "gone": lambda: None,
        "longer": lambda: counted(path, 101),
        "shorter": lambda: counted(path, 99),
        "rate": lambda: counted(path, 100, rate=16_000),
        "text": lambda: path.write_text("no audio" * 20),
    }
    changes[change]()
    with pytest.raises(ReadError, match=r"a\.wav"):
        taken(source, [0])


def test_a_file_that_is_truncated_while_it_is_open_is_a_read_error(tmp_path):
    counted(tmp_path / "a.wav", 30_000)
    source = AudioSource(tmp_path, window_frames=100)
    taken(source, [0])
    with (tmp_path / "a.wav").open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(ReadError, match=r"frames 20000–20099 of .*a\.wav"):
        taken(source, [200])
    assert of(tmp_path) == [], "what failed is closed"


def test_missing_or_invalid_files_are_refused(tmp_path):
    with pytest.raises(SourceError, match="No wav, flac, ogg or mp3 files in"):
        AudioSource(tmp_path)
    with pytest.raises(SourceError, match="no folder"):
        AudioSource(tmp_path / "none")
    with pytest.raises(SourceError, match="at least one path"):
        AudioSource([])
    with pytest.raises(ReadError, match=r"Could not open .*none\.wav"):
        AudioSource([tmp_path / "none.wav"])
    soundfile.write(tmp_path / "empty.wav", np.empty((0, 1)), 1000)
    with pytest.raises(SourceError, match=r"empty\.wav .*0 frames"):
        AudioSource(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        *({"window_frames": value} for value in (0, -1, 1.5, True, "9")),
        *({"rate_hz": value} for value in (0, -8000, np.nan, "8000")),
        *({"open_files": value} for value in (0, 1.5)),
        {"channels": "left"},
        {"tail": "pad"},
    ],
    ids=str,
)
def test_invalid_options_are_refused_on_construction(tmp_path, options):
    counted(tmp_path / "a.wav", 10)
    with pytest.raises(OptionError, match=f"^{next(iter(options))} must be "):
        AudioSource(tmp_path, **options)
