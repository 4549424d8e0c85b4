"""Quantized audio for autoregressive models: which frames become which codes, in which batch, in which partition."""

import math
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock_cases import few_cases
from scipy.signal import resample_poly
from torch.utils.data import DataLoader

from penstock.core.errors import OptionError, ReadError, ResumeError, SourceError
from penstock.recipes.chunked import ChunkedSequenceDataset, ChunkedTrainingMixin
from penstock.recipes.chunked.audio import (
    ChunkedQuantizedAudioDataset,
    ChunkedQuantizedAutoregressiveAudio,
    QuantizedAudioDataset,
    QuantizedAutoregressiveAudio,
    collate_audio,
)
from penstock.transform.quantization import quantize

ZERO = 1 << 15


def song(path: Path, n_frames: int, first: int = 0, *, rate: int = 8000, channels: int = 1) -> None:
    """Frame f of the file is the value first + f, of 16 bits: the code of 16 bits is `ZERO` more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frames = (first + np.arange(n_frames)).astype(np.int16)
    soundfile.write(path, np.stack([frames] * channels, axis=1), rate, subtype="PCM_16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty songs of 25 frames; song n begins with the value 100 n."""
    found = tmp_path_factory.mktemp("songs")
    for number in range(20):
        song(found / f"song{number}.{'flac' if number % 3 else 'wav'}", 25, 100 * number)
    return found


def songs(dataset: QuantizedAudioDataset) -> list[int]:
    return [int(Path(name).stem.removeprefix("song")) for name in dataset.file_names]


def column(tensor: torch.Tensor) -> list[Any]:
    assert tensor.shape == (len(tensor), 1)
    return tensor[:, 0].tolist()


def frames(number: int, start: int, stop: int) -> list[int]:
    """The codes of 16 bits of frames of a song."""
    return [ZERO + 100 * number + frame for frame in range(start, min(stop, 25))]


# -- items -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample_len", [None, 1, 10, 25, 40])
@pytest.mark.parametrize("drop_last", [False, True])
def test_y_are_the_codes_of_a_window_and_x_is_one_step_later(folder, sample_len, drop_last):
    options = {"sample_len": sample_len, "drop_last": drop_last, "bits": 16}
    length = sample_len or 25
    wanted = [frames(n, start, start + length) for n in range(20) for start in range(0, 25, length)]
    if drop_last:
        wanted = [codes for codes in wanted if len(codes) == length]
    if not wanted:
        with pytest.raises(SourceError, match="must have window_frames=40 frames, but the longest of 20"):
            QuantizedAudioDataset(folder, **options)
        return
    dataset = QuantizedAudioDataset(folder, **options)
    assert len(dataset) == len(wanted)
    for number, codes in enumerate(wanted):
        x, y = dataset[number]
        assert x.dtype == y.dtype == torch.int64
        assert column(y) == codes
        assert column(x) == [ZERO, *codes[:-1]]


def test_context_is_not_predicted_and_padding_is_silence_before_x(folder):
    dataset = QuantizedAudioDataset(folder, 16, sample_len=10, drop_last=True, context_len=4, pad_len=3)
    codes = frames(1, 10, 20)
    x, y = dataset[3]
    assert (column(x), column(y)) == ([ZERO] * 4 + codes[:-1], codes[4:])
    whole, short = (QuantizedAudioDataset(folder, 16, sample_len=10, context_len=steps) for steps in (4, 5))
    assert (len(whole), len(short)) == (60, 40)  # ends of 5 steps are left out
    assert [column(y) for _, y in short.__getitems__([2, 39])] == [frames(1, 5, 10), frames(19, 15, 20)]
    with pytest.raises(OptionError, match=r"context_len must be .*got 25.*: the longest item has 25 steps"):
        QuantizedAudioDataset(folder, 16, context_len=25)


def test_without_a_return_type_items_are_codes_and_without_quantization_values(folder):
    dataset = QuantizedAudioDataset(folder, 16, sample_len=10, return_type=None)
    assert column(dataset[5]) == frames(1, 20, 30)
    values = [(code - ZERO) / 2**15 for code in frames(1, 20, 30)]
    x, y = QuantizedAudioDataset(folder, sample_len=10, quantization=None)[5]
    assert x.dtype == y.dtype == torch.float32
    assert (column(x), column(y)) == ([0.0, *values[:-1]], values)
    with pytest.raises(OptionError, match="context_len and pad_len"):
        QuantizedAudioDataset(folder, return_type=None, pad_len=1)


def test_values_of_one_batch_do_not_share_memory(folder):
    dataset = QuantizedAudioDataset(folder, sample_len=5, quantization=None, return_type=None)
    first, second = dataset.__getitems__([0, 1])
    first[:] = 7
    assert column(second) == [frame / 2**15 for frame in range(5, 10)]
    assert first.untyped_storage().nbytes() == 5 * 4


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_mu_law_is_the_formula(tmp_path, bits):
    values = np.random.default_rng(2).integers(-(2**15), 2**15, 60).astype(np.int16)
    soundfile.write(tmp_path / "a.wav", values, 8000, subtype="PCM_16")
    mu, zero = 2**bits - 1, 2 ** (bits - 1)
    wanted = []
    for value in values.tolist():
        x = value / 2**15
        companded = math.copysign(math.log(1 + mu * abs(x)) / math.log(1 + mu), x)
        wanted.append(min(mu, round(companded * zero) + zero))
    x, y = QuantizedAudioDataset(tmp_path, bits, quantization="mu-law")[0]
    assert column(y) == wanted
    assert column(x) == [zero, *wanted[:-1]]


def s4_codes(seq: torch.Tensor, bits: int, quantization: str) -> torch.Tensor:
    """The formulas that models of S4 were trained on: float32, and the scale of each item."""
    low, high = torch.amin(seq), torch.amax(seq)
    first = -1 if quantization == "mu-law" else 0
    scaled = first + (1 - first) * (seq - low) / (high - low + 1e-6)
    if quantization == "mu-law":
        mu = torch.tensor((1 << bits) - 1)
        companded = torch.log1p(mu * torch.abs(scaled + 1e-8)) / torch.log1p(mu)
        scaled = (torch.sign(scaled) * companded + 1) / 2
    scaled *= (1 << bits) - 0.01
    scaled += 0.01 / 2
    return scaled.long()


@pytest.mark.parametrize("quantization", ["linear", "mu-law"])
@pytest.mark.parametrize("bits", [1, 8, 16])
def test_the_codes_of_s4_come_back_bit_for_bit(tmp_path, bits, quantization):
    times = np.arange(20_000) / 8000
    tone = 0.3 * np.sin(2 * np.pi * 440 * times) * np.exp(-times) + 0.01 * np.random.default_rng(1).normal(size=20_000)
    soundfile.write(tmp_path / "a.wav", tone, 8000, subtype="PCM_16")
    soundfile.write(tmp_path / "b.wav", np.zeros(100), 8000, subtype="PCM_16")
    options = {"sample_len": 1024, "quantization": quantization}
    amplitudes = QuantizedAudioDataset(tmp_path, sample_len=1024, quantization=None, return_type=None)
    dataset = QuantizedAudioDataset(tmp_path, bits, scale="item", **options)
    for number in range(len(amplitudes)):
        wanted = s4_codes(amplitudes[number], bits, quantization)
        x, y = dataset[number]
        assert torch.equal(y, wanted)
        assert column(x) == [1 << bits - 1, *column(wanted)[:-1]]
        assert np.array_equal(quantize(amplitudes[number].numpy(), bits, quantization, scale="item"), wanted.numpy())
    partitions = QuantizedAutoregressiveAudio(tmp_path, scale="item", **options)
    assert partitions._make_partition(0, 1).scale == "item"


def test_channels_become_their_mean_and_other_rates_are_resampled(tmp_path):
    both = np.random.default_rng(3).integers(-9000, 9000, (400, 2)).astype(np.int16)
    soundfile.write(tmp_path / "a.flac", both, 8000)
    mean = (both / 2**15).astype(np.float32).astype(np.float64).mean(axis=1)
    dataset = QuantizedAudioDataset(tmp_path, sample_len=60, quantization=None, return_type=None, target_sr=16_000)
    whole = resample_poly(mean.astype(np.float32).astype(np.float64), 2, 1)
    assert (len(dataset), len(dataset[13])) == (14, 20)  # 800 frames, after resampling
    for number in range(14):
        np.testing.assert_allclose(column(dataset[number]), whole[60 * number : 60 * (number + 1)], rtol=0, atol=1e-7)
    codes = QuantizedAudioDataset(tmp_path, 8)[0][1]
    assert column(codes) == [round(float(np.float32(value)) * 128) + 128 for value in mean]


@pytest.mark.parametrize("index", [-1, 60, 10**9])
def test_an_item_that_does_not_exist_is_an_index_error(folder, index):
    dataset = QuantizedAudioDataset(folder, sample_len=10)
    with pytest.raises(IndexError, match=f"Items must be 0–59, got {index}"):
        dataset[index]
    with pytest.raises(IndexError):
        dataset.__getitems__([0, index])
    with pytest.raises(TypeError):
        dataset[1.5]
    with pytest.raises(TypeError, match="mono"):
        QuantizedAudioDataset(folder, mono=True)


def test_a_file_with_nan_or_that_is_gone_is_named(tmp_path):
    values = np.zeros(30, np.float32)
    values[17] = np.nan
    soundfile.write(tmp_path / "a.wav", values, 8000, subtype="FLOAT")
    dataset = QuantizedAudioDataset(tmp_path, sample_len=10)
    assert column(dataset[0][1]) == [128] * 10
    with pytest.raises(SourceError, match=r"Could not quantize item 1 \(frames 10–19 of .*a\.wav\): .*NaN"):
        dataset[1]
    (tmp_path / "a.wav").unlink()
    with pytest.raises(ReadError, match=r"a\.wav"):
        pickle.loads(pickle.dumps(dataset))[0]
    with pytest.raises(SourceError, match="No wav, flac, ogg or mp3 file"):
        QuantizedAudioDataset(tmp_path)


# -- which files -------------------------------------------------------------------------------------------------------


def test_files_are_sorted_as_a_person_would(tmp_path):
    names = [
        "song2.wav",
        "song10.wav",
        "song02.wav",
        "b/1.wav",
        "b10/1.wav",
        "b9/3.wav",
        "9.wav",
        "10.flac",
        "é2x10.wav",
    ]
    for name in [*names, "é2x9.wav", ".song1.wav"]:
        song(tmp_path / name, 5)
    found = [str(Path(name).relative_to(tmp_path)) for name in QuantizedAudioDataset(tmp_path).file_names]
    assert found == [
        "9.wav", "10.flac", "b/1.wav", "b9/3.wav", "b10/1.wav",
        "song02.wav", "song2.wav", "song10.wav", "é2x9.wav", "é2x10.wav",
    ]  # fmt: skip


@few_cases
@given(cuts=st.lists(st.floats(0, 1), max_size=4))
def test_consecutive_ratios_hold_each_file_once(folder, cuts):
    bounds = [0.0, *sorted(cuts), 1.0]
    found: list[int] = []
    for low, high in pairwise(bounds):
        try:
            found += songs(QuantizedAudioDataset(folder, ratio_min=low, ratio_max=high))
        except OptionError as error:
            assert "20 files" in str(error) or low == high  # noqa: PT017
    assert found == list(range(20))


def test_ratios_are_what_they_say_in_decimals(folder):
    assert int((1 - 0.8) * 20) == 3, "as floats are"
    assert songs(QuantizedAudioDataset(folder, ratio_max=1 - 0.8)) == [0, 1, 2, 3]
    assert songs(QuantizedAudioDataset(folder, ratio_min=np.float32(0.95))) == [19]
    with pytest.raises(OptionError, match=r"one of the 20 files in .*, got 0\.5 and 0\.54.*0\.05 or more apart"):
        QuantizedAudioDataset(folder, ratio_min=0.5, ratio_max=0.54)


@pytest.mark.parametrize(
    "options",
    [
        *({"bits": value} for value in (0, 17, 8.5)),
        *({"ratio_min": value} for value in (-0.1, 1, np.nan, "0", True)),
        *({"ratio_max": value} for value in (0, 1.1)),
        *({"sample_len": value} for value in (0, 2.5)),
        *({"context_len": value} for value in (-1, 2.5)),
        *({"pad_len": value} for value in (-1, 2.5)),
        {"target_sr": 0, "rate_hz": 0},
        {"quantization": "a-law"},
        {"return_type": "pairs"},
        {"scale": "file"},
        {"quantization": None, "scale": "item"},
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused_at_once(folder, options):
    name = list(options)[-1]
    options.pop("rate_hz", None)
    with pytest.raises(OptionError, match=rf"{name}( must|=)"):
        QuantizedAudioDataset(folder, **options)


# -- batches -----------------------------------------------------------------------------------------------------------


def test_shorter_items_are_filled_up_in_time_and_left_out_of_the_loss(folder):
    dataset = QuantizedAudioDataset(folder, 8, ratio_max=0.1, sample_len=10, pad_len=2)
    x, y, extras = next(iter(DataLoader(dataset, batch_size=6, collate_fn=collate_audio)))
    assert (x.shape, y.shape, x.dtype, y.dtype) == ((6, 12, 1), (6, 10, 1), torch.int64, torch.int64)
    assert (extras["lengths"].tolist(), extras["lengths"].dtype) == ([12, 12, 7] * 2, torch.int64)
    for row in range(6):
        alone_x, alone_y = dataset[row]
        assert column(x[row]) == column(alone_x) + [128] * (12 - len(alone_x))
        assert column(y[row]) == column(alone_y) + [-100] * (10 - len(alone_y))
    logits = torch.randn(6, 10, 256, generator=torch.Generator().manual_seed(1))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    parts = torch.cat([logits[row, : extras["lengths"][row] - 2] for row in range(6)])
    whole = torch.cat([dataset[row][1] for row in range(6)])
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(parts, whole.flatten()))


def test_codes_alone_need_to_know_what_silence_is(folder):
    dataset = QuantizedAudioDataset(folder, 16, sample_len=20, return_type=None)
    x, extras = dataset.collate_fn(dataset.__getitems__([0, 1]))
    assert (column(x[1]), extras["lengths"].tolist()) == (frames(0, 20, 25) + [ZERO] * 15, [20, 5])
    with pytest.raises(OptionError, match="zero="):
        collate_audio(dataset.__getitems__([0, 1]))
    assert len(collate_audio(dataset.__getitems__([0, 2]))[0]) == 2


def plain(batches: Any) -> list[Any]:
    return [(x.tolist(), y.tolist(), extras["lengths"].tolist()) for x, y, extras in batches]


def test_a_spawned_worker_gives_the_chunks_that_no_worker_gives(folder):
    options: dict[str, Any] = {"bits": 16, "sample_len": 10}
    alone = ChunkedQuantizedAudioDataset(folder, **options).loader(batch_size=4, chunk_size=6, seed=3)
    worker = ChunkedQuantizedAudioDataset(folder, **options).loader(
        4, 6, seed=3, num_workers=1, multiprocessing_context="spawn", persistent_workers=True
    )
    whole = [plain(alone) for _ in range(5)]
    assert [plain(worker) for _ in range(2)] == whole[:2]
    seen = sorted(y[0][0] for chunk in whole for _, ys, _ in chunk for y in ys)
    assert seen == sorted(2 * [frames(n, start, 25)[0] for n in range(20) for start in (0, 10, 20)]), "two passes"


def test_a_chunked_loader_goes_on_where_its_state_was_taken(folder):
    dataset = ChunkedQuantizedAudioDataset(folder, 16, sample_len=10)
    loader = dataset.loader(4, 6, seed=5)
    whole = plain(loader) + plain(loader) + plain(loader)
    stopped = dataset.loader(4, 6, seed=5)
    plain(stopped)
    batches = iter(stopped)
    assert plain([next(batches), next(batches)]) == whole[6:8]
    state = stopped.state_dict()
    again = pickle.loads(pickle.dumps(dataset)).loader(4, 6, seed=5)
    again.load_state_dict(state)
    assert plain(again) + plain(again) == whole[8:]
    with pytest.raises(ResumeError):
        ChunkedQuantizedAudioDataset(folder, 16, sample_len=5).loader(4, 6, seed=5).load_state_dict(state)
    assert dataset.identity == dataset.source.index.identity != ""
    assert len(plain(dataset.loader(batch_size=7))) == 9, "without a chunk size, all of it"
    assert len(list(DataLoader(dataset, batch_size=7, collate_fn=list))) == 9


# -- data modules ------------------------------------------------------------------------------------------------------


def test_partitions_are_by_file(folder):
    data = QuantizedAutoregressiveAudio(folder, sample_len=10)
    assert (data._name_, data.bits, data.train_percentage, data.quantization, data.drop_last) == (
        "qautoaudio", 8, 0.88, "linear", False
    )  # fmt: skip
    assert (data.d_input, data.d_output, data.l_output, data.n_tokens) == (1, 256, 10, 256)
    data.setup()
    assert [songs(part) for part in (data.dataset_train, data.dataset_val, data.dataset_test)] == [
        [*range(17)], [17], [18, 19]
    ]  # fmt: skip  # 0.88 · 20 = 17.6, 0.94 · 20 = 18.8
    values = QuantizedAutoregressiveAudio(folder, quantization=None)
    assert (values.d_output, values.l_output, values.n_tokens) == (1, None, None)


def test_loaders_fill_up_batches_unless_told_otherwise(folder):
    data = QuantizedAutoregressiveAudio(folder, bits=16, sample_len=10, train_percentage=0.5, pad_len=1, seed=4)
    data.setup()
    train = plain(data.train_dataloader(batch_size=8))
    assert sorted(y[0][0] for _, ys, _ in train for y in ys) == sorted(
        frames(n, start, 25)[0] for n in range(10) for start in (0, 10, 20)
    )
    for loader, numbers in ((data.val_dataloader, range(10, 15)), (data.test_dataloader, range(15, 20))):
        found = plain(loader(batch_size=4))
        wanted = [frames(n, start, start + 10) for n in numbers for start in (0, 10, 20)]
        rows = [row for x, y, lengths in found for row in zip(x, y, lengths, strict=True)]
        assert len(rows) == 15
        for (x, y, length), codes in zip(rows, wanted, strict=True):
            assert length == len(codes) + 1
            assert [value for (value,) in x][:length] == [ZERO, ZERO, *codes[:-1]]
            assert {value for (value,) in x[length:]} <= {ZERO}
            assert [value for (value,) in y if value != -100] == codes
    assert len(next(iter(data.test_dataloader(batch_size=2, collate_fn=list)))) == 2


@pytest.mark.parametrize(("n_files", "cure"), [(1, "Give 3 or more"), (2, "Give 3 or more"), (3, "0.5"), (10, "0.85")])
def test_a_partition_without_files_is_refused_with_what_would_do(tmp_path, n_files, cure):
    for number in range(n_files):
        song(tmp_path / f"song{number}.wav", 5)
    train = 0.99 if n_files == 10 else 0.88
    with pytest.raises(
        OptionError, match=rf"validation.*: {n_files} files in .* at train_percentage={train}\. .*{cure}\.$"
    ):
        QuantizedAutoregressiveAudio(tmp_path, train_percentage=train).setup()
    if n_files > 2:
        data = QuantizedAutoregressiveAudio(tmp_path, train_percentage=float(cure))
        data.setup()
        assert [len(part) for part in (data.dataset_train, data.dataset_val, data.dataset_test)] == [n_files - 2, 1, 1]


@pytest.mark.parametrize("kind", [QuantizedAutoregressiveAudio, ChunkedQuantizedAutoregressiveAudio])
def test_unknown_options_are_no_options(kind, folder):
    with pytest.raises(TypeError, match="sample_length"):
        kind(data_dir=folder, sample_length=10)
    with pytest.raises(TypeError, match="data_dir"):
        kind()
    for options in ({"train_percentage": 1.0}, {"bits": 0}, {"quantization": "pcm"}, {"pad_len": -1}):
        with pytest.raises(OptionError, match=f"{next(iter(options))} must"):
            kind(data_dir=folder, **options)


class Loop(ChunkedTrainingMixin):
    def __init__(self, config: Any, data: ChunkedSequenceDataset) -> None:
        self.data = data
        super().__init__(config)

    def training_step(self, batch: Any) -> Any:
        return plain([batch])[0]

    validation_step = training_step


def test_a_module_with_chunks_walks_all_of_it_and_goes_on_after_a_restart(folder):
    def module(**chunks: int) -> ChunkedQuantizedAutoregressiveAudio:
        data = ChunkedQuantizedAutoregressiveAudio(
            **chunks, data_dir=folder, bits=16, train_percentage=0.5, sample_len=10, seed=6
        )
        data.setup()
        return data

    data = module(train_chunk_size=3, val_chunk_size=2)
    train, val = data.train_dataloader(batch_size=5), data.val_dataloader(batch_size=5)
    epochs = [(plain(train), plain(val)) for _ in range(4)]
    assert [len(batches) for batches, _ in epochs] == [3] * 4
    assert [len(batches) for _, batches in epochs] == [2, 1, 2, 1]
    firsts = sorted(y[0][0] for batches, _ in epochs for _, ys, _ in batches for y in ys)
    assert firsts == sorted(2 * [frames(n, start, 25)[0] for n in range(10) for start in (0, 10, 20)])
    other = module(train_chunk_size=3, val_chunk_size=2)
    loader = other.train_dataloader(batch_size=5)
    assert (plain(loader), next(iter(loader))[0].tolist()) == (epochs[0][0], epochs[1][0][0][0])
    last = module(train_chunk_size=3, val_chunk_size=2)
    rest = last.train_dataloader(batch_size=5)
    last.load_state_dict(other.state_dict())
    assert plain(rest) + plain(rest) == epochs[1][0][1:] + epochs[2][0]
    loop = Loop({"train": {"train_chunk_size": 3, "val_chunk_size": 2}, "loader": {"batch_size": 5}}, module())
    assert [(r["train"], r["val"]) for r in (loop.train_epoch_with_chunking() for _ in range(2))] == epochs[:2]
    assert len(plain(module().train_dataloader(batch_size=5))) == 6, "all of it, without chunks"
