"""Seed 001: quantized audio for autoregressive models, in the manner of S4, with or without chunks."""

import operator
import os
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, SourceError
from penstock.recipes.chunked.audio_collate import collate_audio
from penstock.recipes.chunked.datasets import ChunkedSequenceDataset, SequenceDataset
from penstock.recipes.chunked.loader import ChunkedDataLoader
from penstock.source.audio.file import audio_files
from penstock.source.audio.source import AudioSource
from penstock.transform.quantization import Quantization, checked_bits, q_zero, quantize

__all__ = [
    "ChunkedQuantizedAudioDataset",
    "ChunkedQuantizedAutoregressiveAudio",
    "QuantizedAudioDataset",
    "QuantizedAutoregressiveAudio",
]

_RATIO_STEPS = 1_000_000  # ratios are what they say in decimals: 0.29 of 100 files are 29


class QuantizedAudioDataset(Dataset[Any]):
    """Windows of the audio files of a folder, as codes to predict one after the other: a torch data set.

    Files are sorted as a person would (`song2` before `song10`), in the folders within, too; several channels become
    their mean. An item is a pair `(x, y)`, both of shape (frames, 1): `y` are the codes, and `x` is `y` one step later,
    beginning with the code of silence. Codes are on a fixed scale
    (`penstock.transform.quantize`): the same sound is the same code in every item.

    Shuffled items of ogg files cost much more than those of wav and flac files: see `AudioSource`.

    Parameters
    ----------
    path
        The folder.
    bits
        Of a code; not used where there is no quantization.
    ratio_min, ratio_max
        Which share of the files, from one ratio to before another: data sets of 0 to 0.9 and of 0.9 to 1 hold each file
        once.
    sample_len
        Frames of an item, after resampling; None: items are whole files.
    quantization
        None: `x` and `y` are the values themselves, float32, and silence is 0.0.
    return_type
        None: items are the codes alone.
    drop_last
        Leave out the end of a file that fills no item; otherwise it is a shorter one, for `collate_audio` to fill up.
    target_sr
        The sampling rate; None: that of the files.
    context_len
        Steps at the beginning that are not to be predicted: `y` begins after them.
    pad_len
        Steps of silence before `x`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        bits: int = 8,
        ratio_min: float = 0,
        ratio_max: float = 1,
        sample_len: int | None = None,
        quantization: Quantization | None = "linear",
        return_type: Literal["autoregressive"] | None = "autoregressive",
        drop_last: bool = False,
        target_sr: float | None = None,
        context_len: int | None = None,
        pad_len: int | None = None,
    ) -> None:
        self.zero = _zero(bits, quantization)
        _check_steps(sample_len, context_len, pad_len)
        if return_type not in ("autoregressive", None):
            raise OptionError(f"return_type={return_type!r}; use 'autoregressive' or None.")
        if return_type is None and (context_len or pad_len):
            raise OptionError(
                "context_len and pad_len are of pairs (x, y); use them with return_type='autoregressive'."
            )
        self.path, self.bits, self.ratio_min, self.ratio_max = path, bits, ratio_min, ratio_max
        self.sample_len, self.quantization, self.return_type = sample_len, quantization, return_type
        self.drop_last, self.target_sr, self.context_len, self.pad_len = drop_last, target_sr, context_len, pad_len
        self.source = AudioSource(
            _share(_sorted_files(path), ratio_min, ratio_max, path),
            window_frames=sample_len,
            rate_hz=target_sr,
            tail="drop" if drop_last else "short",
        )
        self._check_context()

    @property
    def file_names(self) -> list[str]:
        """The files, in the order of their items."""
        return list(self.source.files)

    @property
    def identity(self) -> str:
        """What tells these items from those of other files, or of another length."""
        return self.source.index.identity

    @property
    def collate_fn(self) -> Any:
        """What makes batches of these items: `collate_audio`, with their code of silence."""
        return partial(collate_audio, zero=self.zero)

    def __len__(self) -> int:
        return len(self.source.index)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return items, each file opened once for all of them; a torch DataLoader asks for a batch this way."""
        numbers = [operator.index(index) for index in indices]
        for number in numbers:
            if not 0 <= number < len(self):
                raise IndexError(f"There is no item {number}; this data set has items 0–{len(self) - 1}.")
        found = self.source.take(np.array(numbers, np.int64))["audio"]
        return [self._item(number, audio) for number, audio in zip(numbers, found, strict=True)]

    def _item(self, number: int, audio: NDArray[np.float32]) -> Any:
        values = torch.from_numpy(audio)
        # A copy where nothing is encoded: items of one read lie in the same memory.
        codes = values.clone() if self.quantization is None else self._encoded(number, values)
        if self.return_type is None:
            return codes
        before = codes.new_full(((self.pad_len or 0) + 1, 1), self.zero)
        return torch.cat([before, codes[:-1]]), codes[self.context_len or 0 :]

    def _encoded(self, number: int, values: torch.Tensor) -> torch.Tensor:
        assert self.quantization is not None, "asked only where there are codes"
        try:
            return quantize(values, self.bits, self.quantization)
        except OptionError as error:
            raise SourceError(f"{self._where(number)} cannot be quantized: {error}") from error

    def _where(self, number: int) -> str:
        file, start, stop = (int(array[0]) for array in self.source.windows(np.array([number])))
        return f"Item {number} (frames {start}–{stop - 1} of {self.source.files[file]})"

    def _check_context(self) -> None:
        """Raise where nothing is left of an item to be predicted: its loss would be NaN."""
        if not self.context_len:
            return
        _, starts, stops = self.source.windows(np.arange(len(self)))
        shortest = int((stops - starts).argmin())
        if stops[shortest] - starts[shortest] <= self.context_len:
            raise OptionError(
                f"{self._where(shortest)} has nothing to predict after context_len={self.context_len}; use a shorter "
                "context_len, or drop_last=True to leave out what fills no item."
            )


class ChunkedQuantizedAudioDataset(QuantizedAudioDataset):
    """Audio data set with chunked training support: what it adds is a loader that walks it in chunks of batches."""

    def loader(self, batch_size: int = 1, chunk_size: int | None = None, **loader: Any) -> ChunkedDataLoader:
        """Return a loader of batches `(x, y, {"lengths"})`; without a chunk size, one that goes over all each time.

        Parameters
        ----------
        chunk_size
            Batches per chunk.
        loader
            Any others of `ChunkedDataLoader`, and of torch's.
        """
        return ChunkedDataLoader(self, batch_size, chunk_size, **{"collate_fn": self.collate_fn, **loader})


class QuantizedAutoregressiveAudio(SequenceDataset):
    """Audio files for autoregressive training: three partitions, by file.

    Parameters
    ----------
    data_dir
        The folder of the files.
    train_percentage
        The share of the files for training; validation and test get half of the rest each.
    bits, sample_len, quantization, drop_last, target_sr, context_len, pad_len
        Of `QuantizedAudioDataset`.
    seed
        Of the order and of `split_train_val`.
    """

    _name_ = "qautoaudio"

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        *,
        bits: int = 8,
        train_percentage: float = 0.88,
        sample_len: int | None = None,
        quantization: Quantization | None = "linear",
        drop_last: bool = False,
        target_sr: float | None = None,
        context_len: int | None = None,
        pad_len: int | None = None,
        seed: int = 42,
    ) -> None:
        super().__init__(data_dir=data_dir, seed=seed)
        self._zero = _zero(bits, quantization)
        _check_steps(sample_len, context_len, pad_len)
        if not _is_ratio(train_percentage) or not 0 < train_percentage < 1:
            raise OptionError(f"train_percentage={train_percentage!r}; use a share between 0 and 1, such as 0.88.")
        self.bits, self.train_percentage, self.sample_len = bits, train_percentage, sample_len
        self.quantization, self.drop_last, self.target_sr = quantization, drop_last, target_sr
        self.context_len, self.pad_len = context_len, pad_len

    @property
    def d_input(self) -> int:
        """Channels of `x`."""
        return 1

    @property
    def d_output(self) -> int:
        """Codes that a model chooses from; 1 where it gives the value itself."""
        return 1 if self.quantization is None else 1 << self.bits

    @property
    def l_output(self) -> int | None:
        """Frames of an item; None where items are whole files."""
        return self.sample_len

    @property
    def n_tokens(self) -> int | None:
        """Codes that `x` is made of; None where it is made of values."""
        return None if self.quantization is None else 1 << self.bits

    @property
    def collate_fn(self) -> Any:
        """What makes batches: `collate_audio`, with the code of silence."""
        return partial(collate_audio, zero=self._zero)

    def setup(self) -> None:
        """Make the partitions; each has one file at least."""
        bounds = (0, self.train_percentage, (1 + self.train_percentage) / 2, 1)
        n_files = len(_sorted_files(self.data_dir))
        counts = [_cut(high, n_files) - _cut(low, n_files) for low, high in pairwise(bounds)]
        if not all(counts):
            few = n_files < len(counts)
            cure = f"give {len(counts)} or more" if few else f"use train_percentage={(n_files - 1.5) / n_files:.4g}"
            raise OptionError(
                f"{n_files} files in {self.data_dir} at train_percentage={self.train_percentage} are {counts[0]} for "
                f"training, {counts[1]} for validation and {counts[2]} for testing; {cure}."
            )
        self.dataset_train, self.dataset_val, self.dataset_test = (
            self._between(low, high) for low, high in pairwise(bounds)
        )

    def _between(self, ratio_min: float, ratio_max: float) -> QuantizedAudioDataset:
        return QuantizedAudioDataset(
            self.data_dir,
            self.bits,
            ratio_min,
            ratio_max,
            self.sample_len,
            self.quantization,
            drop_last=self.drop_last,
            target_sr=self.target_sr,
            context_len=self.context_len,
            pad_len=self.pad_len,
        )

    def train_dataloader(self, **loader: Any) -> Any:
        """Return the loader of the training partition, shuffled."""
        return super().train_dataloader(**{"collate_fn": self.collate_fn, **loader})

    def val_dataloader(self, **loader: Any) -> Any:
        """Return the loader of the validation partition: all of it, in order."""
        return super().val_dataloader(**{"collate_fn": self.collate_fn, **loader})

    def test_dataloader(self, **loader: Any) -> Any:
        """Return the loader of the test partition: all of it, in order."""
        return super().test_dataloader(**{"collate_fn": self.collate_fn, **loader})


class ChunkedQuantizedAutoregressiveAudio(QuantizedAutoregressiveAudio, ChunkedSequenceDataset):
    """Audio files for autoregressive training, walked in chunks where a chunk size is given.

    Parameters
    ----------
    train_chunk_size, val_chunk_size, limits
        Of `ChunkedSequenceDataset`.
    audio
        Of `QuantizedAutoregressiveAudio`.
    """

    def __init__(
        self,
        train_chunk_size: int | None = None,
        val_chunk_size: int | None = None,
        *,
        limits: Mapping[str, Any] | None = None,
        **audio: Any,
    ) -> None:
        super().__init__(**audio)
        # The audio knows of no chunks, and has called this without them.
        ChunkedSequenceDataset.__init__(
            self, train_chunk_size, val_chunk_size, limits=limits, data_dir=self.data_dir, seed=self.seed
        )


def _zero(bits: int, quantization: str | None) -> float:
    """Return what silence is, or say why these options cannot be."""
    checked_bits(bits)
    if quantization not in ("linear", "mu-law", None):
        raise OptionError(f"quantization={quantization!r}; use 'linear', 'mu-law' or None.")
    return 0.0 if quantization is None else q_zero(bits)


def _check_steps(sample_len: int | None, context_len: int | None, pad_len: int | None) -> None:
    for name, steps, at_least in (
        ("sample_len", sample_len, 1),
        ("context_len", context_len, 0),
        ("pad_len", pad_len, 0),
    ):
        if steps is not None:
            check_integer(name, steps, at_least=at_least)


def _sorted_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return the audio files of a folder as a person would sort them."""
    folder = Path(path)
    found = audio_files(folder)
    if not found:
        raise SourceError(f"There is no wav, flac or ogg file in {folder}.")
    return sorted(found, key=lambda file: _natural(file.relative_to(folder)))


def _natural(path: Path) -> tuple[list[list[str | int]], str]:
    """Return a key that sorts numbers in names by what they are worth; names that are alike then, by their letters."""
    parts: list[list[str | int]] = []
    for part in path.parts:
        pieces = re.split(r"(\d+)", part)  # words and numbers in turn, so that like is compared with like
        parts.append([int(piece) if place % 2 else piece for place, piece in enumerate(pieces)])
    return parts, str(path)


def _share(files: list[Path], ratio_min: float, ratio_max: float, path: object) -> list[Path]:
    if not (_is_ratio(ratio_min) and _is_ratio(ratio_max) and ratio_min < ratio_max):
        raise OptionError(f"ratio_min={ratio_min!r}, ratio_max={ratio_max!r}; use 0 <= ratio_min < ratio_max <= 1.")
    share = files[_cut(ratio_min, len(files)) : _cut(ratio_max, len(files))]
    if not share:
        raise OptionError(
            f"There are {len(files)} files in {path}, and none from ratio {ratio_min} to {ratio_max}; use ratios that "
            f"are {1 / len(files):.4g} or more apart."
        )
    return share


def _is_ratio(ratio: Any) -> bool:
    return isinstance(ratio, int | float | np.number) and not isinstance(ratio, bool) and bool(0 <= ratio <= 1)


def _cut(ratio: float, n_files: int) -> int:
    """Return how many files are below a ratio."""
    return int(Fraction(float(ratio)).limit_denominator(_RATIO_STEPS) * n_files)
