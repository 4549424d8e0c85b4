"""Quantized audio for autoregressive models, S4-style, with or without chunks."""

import logging
import operator
import os
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from penstock.core.checks import check_choice, check_integer
from penstock.core.errors import OptionError, SourceError
from penstock.files.kinds import local_path
from penstock.recipes.chunked.datasets import ChunkedSequenceDataset, SequenceDataset
from penstock.recipes.chunked.loader import ChunkedDataLoader
from penstock.source.audio.file import find_audio_files
from penstock.source.audio.source import AudioSource
from penstock.transform.quantization import Quantization, Scale, check_bits, check_scale, q_zero, quantize

__all__ = [
    "ChunkedQuantizedAudioDataset",
    "ChunkedQuantizedAutoregressiveAudio",
    "QuantizedAudioDataset",
    "QuantizedAutoregressiveAudio",
    "collate_audio",
]

_LOG = logging.getLogger("penstock")
_IGNORED = -100  # the default ignore_index of torch's cross_entropy
_RATIO_STEPS = 1_000_000  # ratios count as decimals: 0.29 of 100 files is 29


class QuantizedAudioDataset(Dataset[Any]):
    """A torch dataset of windows of audio files, as codes to predict one after another.

    Files of the folder and its subfolders are in natural order (`song2` before `song10`); channels are averaged. An
    item is a pair `(x, y)`, both of shape (frames, 1): `y` holds the codes, and `x` is `y` one step later, preceded by
    the code of silence. Codes have a fixed scale (`penstock.transform.quantize`): the same amplitude is the same
    code in every item, unless `scale="item"` asks for the codes of S4.

    Random access to ogg files costs much more than to wav and flac files: see `AudioSource`.

    Parameters
    ----------
    path
        The folder.
    bits
        Bits of a code; not used without quantization.
    ratio_min, ratio_max
        The files to use, as a half-open range of fractions: the ranges 0 to 0.9 and 0.9 to 1 together hold each file
        once.
    sample_len
        Frames of an item, after resampling; None: items are whole files.
    quantization
        None: `x` and `y` are float32 amplitudes, and silence is 0.0.
    return_type
        None: an item is the codes alone.
    drop_last
        Leave out the end of a file that does not fill an item; False: it is a shorter item, which `collate_audio` pads.
    target_sr
        The sampling rate; None: that of the files.
    context_len
        Steps at the start that are not predicted: `y` starts after them. Items that are not longer, such as the end of
        a file, have nothing to predict and are left out; how many is logged.
    pad_len
        Steps of silence before `x`.
    scale
        `"fixed"`, or `"item"` for models that were trained with S4: the lowest amplitude of each item is code 0, the
        highest about the last one, and there is no way back to amplitudes.
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
        scale: Scale = "fixed",
    ) -> None:
        self.zero = _silence(bits, quantization, scale)
        _check_steps(sample_len, context_len, pad_len)
        check_choice("return_type", return_type, ("autoregressive", None))
        if return_type is None and (context_len or pad_len):
            raise OptionError(
                "context_len and pad_len must be None or 0 with return_type=None, got "
                f"{context_len!r} and {pad_len!r}. Use return_type='autoregressive'."
            )
        self.path, self.bits, self.ratio_min, self.ratio_max = path, bits, ratio_min, ratio_max
        self.sample_len, self.quantization, self.return_type = sample_len, quantization, return_type
        self.scale: Scale = scale
        self.drop_last, self.target_sr, self.context_len, self.pad_len = drop_last, target_sr, context_len, pad_len
        self.source = AudioSource(
            _select_files(_sort_files(path), ratio_min, ratio_max, path),
            window_frames=sample_len,
            rate_hz=target_sr,
            tail="drop" if drop_last else "short",
        )
        self._items = self._find_predictable()

    @property
    def file_names(self) -> list[str]:
        """The files, in item order."""
        return list(self.source.files)

    @property
    def identity(self) -> str:
        """Distinguishes these items from those of other files or another length."""
        left_out = "" if self._items is None else f", longer than {self.context_len}"
        return self.source.index.identity + left_out

    @property
    def collate_fn(self) -> Any:
        """Collate function for these items: `collate_audio` with their code of silence."""
        return partial(collate_audio, zero=self.zero)

    def __len__(self) -> int:
        return len(self.source.index) if self._items is None else len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several items, opening each file once; torch's DataLoader fetches batches this way."""
        numbers = [operator.index(index) for index in indices]
        for number in numbers:
            if not 0 <= number < len(self):
                raise IndexError(f"Items must be 0–{len(self) - 1}, got {number}.")
        stored = self._to_source(np.array(numbers, np.int64))
        found = self.source.take(stored)["audio"]
        return [self._item(number, audio) for number, audio in zip(stored.tolist(), found, strict=True)]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all files."""
        return self.source.stored_bytes

    def _to_source(self, items: NDArray[np.int64]) -> NDArray[np.int64]:
        return items if self._items is None else self._items[items]

    def _item(self, number: int, audio: NDArray[np.float32]) -> Any:
        values = torch.from_numpy(audio)
        # Copied if not encoded: items of one read share memory.
        codes = values.clone() if self.quantization is None else self._encode(number, values)
        if self.return_type is None:
            return codes
        before = codes.new_full(((self.pad_len or 0) + 1, 1), self.zero)
        return torch.cat([before, codes[:-1]]), codes[self.context_len or 0 :]

    def _encode(self, number: int, values: torch.Tensor) -> torch.Tensor:
        assert self.quantization is not None, "called only with quantization"
        try:
            return quantize(values, self.bits, self.quantization, scale=self.scale)
        except OptionError as error:
            raise SourceError(f"Could not quantize {self._describe_item(number)}: {error}") from error

    def _describe_item(self, number: int) -> str:
        file, start, stop = (int(array[0]) for array in self.source.windows(np.array([number])))
        return f"item {number} (frames {start}–{stop - 1} of {self.source.files[file]})"

    def _find_predictable(self) -> NDArray[np.int64] | None:
        """Return the items of the source that are longer than the context; None: all of them."""
        if not self.context_len:
            return None
        _, starts, stops = self.source.windows(np.arange(len(self.source.index)))
        lengths = stops - starts
        found = np.flatnonzero(lengths > self.context_len)
        if not len(found):
            raise OptionError(
                f"context_len must be shorter than an item, got {self.context_len}, which leaves nothing to predict: "
                f"the longest item has {lengths.max()} steps. Use a shorter context_len."
            )
        if len(found) == len(lengths):
            return None
        _LOG.warning(
            "%s of %s items of %s are left out: they have %s steps or fewer, which leaves nothing to predict.",
            len(lengths) - len(found), len(lengths), self.path, self.context_len,
        )  # fmt: skip
        return found


class ChunkedQuantizedAudioDataset(QuantizedAudioDataset):
    """An audio dataset with a loader that walks it in chunks of batches."""

    def loader(self, batch_size: int = 1, chunk_size: int | None = None, **loader: Any) -> ChunkedDataLoader:
        """Return a loader of batches `(x, y, {"lengths"})`; without a chunk size, an epoch is the whole dataset.

        Parameters
        ----------
        chunk_size
            Batches per chunk.
        loader
            Other arguments of `ChunkedDataLoader` and torch's DataLoader.
        """
        return ChunkedDataLoader(self, batch_size, chunk_size, **{"collate_fn": self.collate_fn, **loader})


class QuantizedAutoregressiveAudio(SequenceDataset):
    """Audio files for autoregressive training: three partitions, by file.

    Parameters
    ----------
    data_dir
        The folder of the files.
    train_percentage
        The fraction of the files for training; validation and test get half of the rest each.
    bits, sample_len, quantization, drop_last, target_sr, context_len, pad_len, scale
        As for `QuantizedAudioDataset`.
    seed
        Seed of the order and of `split_train_val`.
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
        scale: Scale = "fixed",
        seed: int = 42,
    ) -> None:
        super().__init__(data_dir=data_dir, seed=seed)
        self._zero = _silence(bits, quantization, scale)
        _check_steps(sample_len, context_len, pad_len)
        if not _is_ratio(train_percentage) or not 0 < train_percentage < 1:
            raise OptionError(
                f"train_percentage must be a fraction between 0 and 1, such as 0.88, got {train_percentage!r}."
            )
        self.bits, self.train_percentage, self.sample_len = bits, train_percentage, sample_len
        self.quantization, self.drop_last, self.target_sr = quantization, drop_last, target_sr
        self.context_len, self.pad_len = context_len, pad_len
        self.scale: Scale = scale

    @property
    def d_input(self) -> int:
        """Channels of `x`."""
        return 1

    @property
    def d_output(self) -> int:
        """Number of codes that a model predicts; 1 without quantization."""
        return 1 if self.quantization is None else 1 << self.bits

    @property
    def l_output(self) -> int | None:
        """Frames of an item; None if items are whole files."""
        return self.sample_len

    @property
    def n_tokens(self) -> int | None:
        """Number of codes in the vocabulary of `x`; None without quantization."""
        return None if self.quantization is None else 1 << self.bits

    @property
    def collate_fn(self) -> Any:
        """Collate function: `collate_audio` with the code of silence."""
        return partial(collate_audio, zero=self._zero)

    def setup(self) -> None:
        """Make the partitions, each with at least one file."""
        bounds = (0, self.train_percentage, (1 + self.train_percentage) / 2, 1)
        n_files = len(_sort_files(self.data_dir))
        counts = [
            _count_files_below(high, n_files) - _count_files_below(low, n_files) for low, high in pairwise(bounds)
        ]
        if not all(counts):
            few = n_files < len(counts)
            cure = f"Give {len(counts)} or more" if few else f"Use train_percentage={(n_files - 1.5) / n_files:.4g}"
            raise OptionError(
                f"Each partition must have a file, got {counts[0]} for training, {counts[1]} for validation and "
                f"{counts[2]} for testing: {n_files} files in {self.data_dir} at train_percentage="
                f"{self.train_percentage}. {cure}."
            )
        self.dataset_train, self.dataset_val, self.dataset_test = (
            self._make_partition(low, high) for low, high in pairwise(bounds)
        )

    def _make_partition(self, ratio_min: float, ratio_max: float) -> QuantizedAudioDataset:
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
            scale=self.scale,
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
    """Audio files for autoregressive training, walked in chunks if there is a chunk size.

    Parameters
    ----------
    train_chunk_size, val_chunk_size, limits
        As for `ChunkedSequenceDataset`.
    audio
        Arguments of `QuantizedAutoregressiveAudio`.
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
        # QuantizedAutoregressiveAudio has called this initializer without chunk sizes.
        ChunkedSequenceDataset.__init__(
            self, train_chunk_size, val_chunk_size, limits=limits, data_dir=self.data_dir, seed=self.seed
        )


def collate_audio(batch: Sequence[Any], *, zero: float | None = None, ignore: float | None = None) -> Any:
    """Return items as one batch, `(x, y, {"lengths"})`, with shorter ones padded at the end, in time.

    Items that are codes alone become `(x, {"lengths"})`. Lengths, int64, are those of `x` before padding.

    Parameters
    ----------
    zero
        Padding of `x`; None: its first value, which is the code of silence in a pair of `QuantizedAudioDataset`.
    ignore
        Padding of `y`; None: -100 for codes, which torch's `cross_entropy` ignores, and NaN for amplitudes, so that a
        loss that does not use the lengths becomes NaN instead of silently wrong.

    Examples
    --------
    >>> long, short = torch.tensor([[128], [7], [8]]), torch.tensor([[128]])
    >>> x, y, extras = collate_audio([(long, long + 1), (short, short + 1)])
    >>> x[..., 0].tolist(), y[..., 0].tolist(), extras["lengths"].tolist()
    ([[128, 7, 8], [128, 128, 128]], [[129, 8, 9], [129, -100, -100]], [3, 1])
    """
    if not batch:
        raise OptionError("batch must have at least one item, got none.")
    if all(isinstance(item, torch.Tensor) for item in batch):
        if zero is None and len({len(item) for item in batch}) > 1:
            raise OptionError(
                "zero must be the code of silence, to pad items of different lengths, got None. Pass zero=."
            )
        return _pad("x", batch, zero or 0), _lengths(batch)
    if not all(isinstance(item, tuple | list) and len(item) == 2 for item in batch):
        kinds = sorted({type(item).__name__ for item in batch})
        raise OptionError(f"Items must be tensors or pairs (x, y) of tensors, got {', '.join(kinds)}.")
    xs, ys = zip(*batch, strict=True)
    silence = xs[0].reshape(-1)[0].item() if zero is None else zero
    nothing = _IGNORED if not ys[0].is_floating_point() else float("nan")
    return _pad("x", xs, silence), _pad("y", ys, nothing if ignore is None else ignore), _lengths(xs)


def _pad(name: str, values: Sequence[torch.Tensor], padding: float) -> torch.Tensor:
    kinds = {(value.dtype, tuple(value.shape[1:])) for value in values}
    if len(kinds) > 1:
        raise OptionError(f"All {name} of a batch must have one dtype and shape besides the length, got {kinds}.")
    if not values[0].is_floating_point() and padding != int(padding):
        raise OptionError(
            f"The padding of {name} must be an integer, since {name} is {values[0].dtype}, got {padding}."
        )
    return pad_sequence(list(values), batch_first=True, padding_value=padding)


def _lengths(values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"lengths": torch.tensor([len(value) for value in values], dtype=torch.int64)}


def _sort_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return the audio files of a folder in natural order."""
    local_path(path)  # a URL would be a folder that does not exist
    folder = Path(path)
    found = find_audio_files(folder)
    if not found:
        raise SourceError(f"No wav, flac, ogg or mp3 file in {folder}. Give the folder of the audio files.")
    return sorted(found, key=lambda file: _natural(file.relative_to(folder)))


def _natural(path: Path) -> tuple[list[list[str | int]], str]:
    """Return a sort key that compares numbers in names by value, and names that are then equal by their characters."""
    parts: list[list[str | int]] = []
    for part in path.parts:
        words = re.split(r"(\d+)", part)  # text and numbers alternate, so that like is compared with like
        parts.append([int(word) if place % 2 else word for place, word in enumerate(words)])
    return parts, str(path)


def _select_files(files: list[Path], ratio_min: float, ratio_max: float, path: object) -> list[Path]:
    """Return the files from one ratio of their number to another; raise OptionError if these are none."""
    if not (_is_ratio(ratio_min) and _is_ratio(ratio_max) and ratio_min < ratio_max):
        raise OptionError(
            f"Ratios must be 0 <= ratio_min < ratio_max <= 1, got ratio_min={ratio_min!r}, ratio_max={ratio_max!r}."
        )
    selected = files[_count_files_below(ratio_min, len(files)) : _count_files_below(ratio_max, len(files))]
    if not selected:
        raise OptionError(
            f"ratio_min and ratio_max must select at least one of the {len(files)} files in {path}, got {ratio_min} "
            f"and {ratio_max}. Use ratios that are {1 / len(files):.4g} or more apart."
        )
    return selected


def _is_ratio(ratio: Any) -> bool:
    """Return whether `ratio` is a number from 0 to 1."""
    return isinstance(ratio, int | float | np.number) and not isinstance(ratio, bool) and bool(0 <= ratio <= 1)


def _count_files_below(ratio: float, n_files: int) -> int:
    """Return the number of files below a ratio."""
    return int(Fraction(float(ratio)).limit_denominator(_RATIO_STEPS) * n_files)


def _silence(bits: int, quantization: str | None, scale: str) -> float:
    """Return the code of silence; raise OptionError if an option is wrong."""
    check_bits(bits)
    check_scale(scale)
    check_choice("quantization", quantization, (*get_args(Quantization), None))
    if quantization is None and scale == "item":
        raise OptionError("scale='item' needs a quantization, got None. Leave out scale for amplitudes as they are.")
    return 0.0 if quantization is None else q_zero(bits)


def _check_steps(sample_len: int | None, context_len: int | None, pad_len: int | None) -> None:
    for name, steps in (("sample_len", sample_len), ("context_len", context_len), ("pad_len", pad_len)):
        if steps is not None:
            check_integer(name, steps, at_least=1 if name == "sample_len" else 0)
