"""Seed 001's collate function: audio of different length, filled up in time."""

from collections.abc import Sequence
from typing import Any

import torch

from penstock.core.errors import OptionError

__all__ = ["collate_audio"]

_IGNORED = -100  # what torch's cross_entropy leaves out


def collate_audio(batch: Sequence[Any], *, zero: float | None = None, ignore: float | None = None) -> Any:
    """Return items as one batch, `(x, y, {"lengths"})`: shorter ones are filled up at their end, in time.

    Items that are codes alone become `(x, {"lengths"})`. Lengths, int64, are those of `x` before it was filled up.

    Parameters
    ----------
    zero
        What `x` is filled up with; None: its first value, which is the code of silence in a pair of
        `QuantizedAudioDataset`.
    ignore
        What `y` is filled up with; None: -100 for codes, which torch's `cross_entropy` leaves out, and NaN for values,
        which no loss takes for a target without a word: use the lengths.

    Examples
    --------
    >>> long, short = torch.tensor([[128], [7], [8]]), torch.tensor([[128]])
    >>> x, y, extras = collate_audio([(long, long + 1), (short, short + 1)])
    >>> x[..., 0].tolist(), y[..., 0].tolist(), extras["lengths"].tolist()
    ([[128, 7, 8], [128, 128, 128]], [[129, 8, 9], [129, -100, -100]], [3, 1])
    """
    if not batch:
        raise OptionError("collate_audio() got no items.")
    if all(isinstance(item, torch.Tensor) for item in batch):
        if zero is None and len({len(item) for item in batch}) > 1:
            raise OptionError(
                "Items of different length are filled up with silence; say with zero= which code that is."
            )
        return _filled("x", batch, zero or 0), _lengths(batch)
    if not all(isinstance(item, tuple | list) and len(item) == 2 for item in batch):
        raise OptionError("collate_audio() takes items that are pairs (x, y) of tensors, or tensors.")
    xs, ys = zip(*batch, strict=True)
    silence = xs[0].reshape(-1)[0].item() if zero is None else zero
    nothing = _IGNORED if not ys[0].is_floating_point() else float("nan")
    return _filled("x", xs, silence), _filled("y", ys, nothing if ignore is None else ignore), _lengths(xs)


def _filled(name: str, values: Sequence[torch.Tensor], filling: float) -> torch.Tensor:
    kinds = {(value.dtype, tuple(value.shape[1:])) for value in values}
    if len(kinds) > 1:
        raise OptionError(f"Items of one batch differ in the {name} they have, besides its length: {kinds}.")
    if not values[0].is_floating_point() and filling != int(filling):
        raise OptionError(f"{name} is {values[0].dtype}, and cannot be filled up with {filling}.")
    longest = max(len(value) for value in values)
    # filled: (items, time, channels)
    filled = values[0].new_full((len(values), longest, *values[0].shape[1:]), filling)
    for row, value in zip(filled, values, strict=True):
        row[: len(value)] = value
    return filled


def _lengths(values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"lengths": torch.tensor([len(value) for value in values], dtype=torch.int64)}
