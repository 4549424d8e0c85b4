"""Collate function for audio of different lengths, padded in time."""

from collections.abc import Sequence
from typing import Any

import torch

from penstock.core.errors import OptionError

__all__ = ["collate_audio"]

_IGNORED = -100  # the default ignore_index of torch's cross_entropy


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
    longest = max(len(value) for value in values)
    # padded: (items, time, channels)
    padded = values[0].new_full((len(values), longest, *values[0].shape[1:]), padding)
    for row, value in zip(padded, values, strict=True):
        row[: len(value)] = value
    return padded


def _lengths(values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"lengths": torch.tensor([len(value) for value in values], dtype=torch.int64)}
