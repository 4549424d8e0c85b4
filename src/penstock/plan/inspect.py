"""Describe an order for people: in words, as a hash, and by how well it mixes."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError
from penstock.core.index import Index
from penstock.core.text import count
from penstock.core.types import Draw
from penstock.plan.costs import EpochCosts, estimate_costs
from penstock.plan.epoch import Epoch, Passes
from penstock.plan.world import slots

__all__ = ["Mixing", "explain_batch", "hash_order", "measure_mixing"]


_WAVES = 16  # independent measures of where a batch lies in storage; 16 reduce the noise of 128 batches to about 3 %


@dataclass(frozen=True, slots=True)
class Mixing:
    """How well an order shuffles, and what that costs."""

    score: float
    """0: batches are consecutive items in storage. 1: batches are spread over the storage like uniform samples."""

    read_amplification: float
    """Items in the chunks that are read, divided by items delivered; 1.0 if every chunk is read once."""

    batches_measured: int
    costs: EpochCosts | None = None
    """What an epoch downloads; None if `stored_bytes` was not given."""

    padding: float | None = None
    """Part of the tokens in the padded batches that is padding; None if the plan does not know lengths."""

    def __str__(self) -> str:
        costs = "" if self.costs is None else f"; {self.costs}"
        costs = costs if self.padding is None else f"{costs}; {self.padding:.1%} of the batches is padding"
        return (
            f"mixing {self.score:.2f} (0 = storage order, 1 = uniform), reads {self.read_amplification:.2f}x the items "
            f"it delivers if only whole chunks can be read; {count(self.batches_measured, 'batch')} measured{costs}"
        )


def explain_batch(epoch: Epoch, batch: int, *, most_items: int | None = 8, keys: Sequence[Any] | None = None) -> str:
    """Return a description of batch `batch` of `epoch`; see `Plan.explain`."""
    draw = epoch.draw(batch)
    items = _format_items(draw.items, most_items, keys)
    sentences = [f"Batch {batch} of {epoch.n_batches} in epoch {epoch.number}: {count(len(draw), 'item')}, {items}."]
    if draw.parts:
        for part in draw.parts:
            spans = ", ".join(f"{start}–{stop - 1}" for start, stop in part.window.spans[:4].tolist())
            more = f" and {len(part.window.spans) - 4} more spans" if len(part.window.spans) > 4 else ""
            sentences.append(
                f"{len(part.rows)} of them are rows of window {part.window.number} of pass {part.window.epoch}, "
                f"which holds items {spans}{more}."
            )
    else:
        sentences.append("They are taken directly from the source.")
    if draw.mask is not None and not draw.mask.all():
        sentences.append(f"{int((~draw.mask).sum())} of them pad the batch (mask False).")
    if draw.epochs is not None and len(draw) and draw.epochs.min() != draw.epochs.max():
        sentences.append(f"The batch crosses the end of pass {draw.epochs.min()}.")
    tokens = epoch.passes.count_tokens(draw)
    if tokens is not None:
        share = f"{1 - tokens[0] / tokens[1]:.1%} padding" if tokens[1] else "no padding"
        sentences.append(f"It has {tokens[0]} tokens, {tokens[1]} with the padding: {share}.")
    return " ".join(sentences)


def _format_items(items: NDArray[np.int64], most: int | None, keys: Sequence[Any] | None) -> str:
    shown = [str(item) if keys is None else f"{item} ({keys[item]})" for item in items[:most].tolist()]
    return ", ".join([*shown, *(["…"] if len(shown) < len(items) else [])])


def hash_order(epoch: Epoch) -> str:
    """Return a hash of the items, batch borders and masks of `epoch`, in order."""
    digest = hashlib.blake2b(digest_size=8)
    for draw in epoch.draws(range(epoch.n_batches)):
        digest.update(len(draw).to_bytes(8, "little"))
        digest.update(draw.items.astype("<i8").tobytes())
        if draw.mask is not None:
            digest.update(np.packbits(draw.mask).tobytes())
    return digest.hexdigest()


def measure_mixing(epoch: Epoch, max_batches: int, *, stored_bytes: int | None, cache_bytes: int | None) -> Mixing:
    """Measure the batches of `epoch`, or the first `max_batches` of them; see `Plan.mixing`."""
    if stored_bytes is None and cache_bytes is not None:
        raise OptionError(f"cache_bytes={cache_bytes} needs stored_bytes, such as source.stored_bytes.")
    costs = None
    if stored_bytes is not None:
        check_integer("stored_bytes", stored_bytes, at_least=0)
        kept = check_integer("cache_bytes", 0 if cache_bytes is None else cache_bytes, at_least=0)
        costs = estimate_costs(epoch.passes, epoch.first_pass, stored_bytes=stored_bytes, cache_bytes=kept)
    draws = list(epoch.draws(range(min(epoch.n_batches, max_batches))))
    delivered = sum(len(draw) for draw in draws)
    padding = _measure_padding(epoch.passes, draws)
    if not delivered:
        return Mixing(0.0, 0.0, 0, costs, padding)
    if draws[0].parts:
        amplification = _window_cost(epoch.passes, draws[0].parts[0].window.epoch, max_batches)
    else:
        amplification = sum(_chunk_items(draw.items, epoch.passes.index) for draw in draws) / delivered
    return Mixing(_score(draws, epoch.passes), amplification, len(draws), costs, padding)


def _measure_padding(passes: Passes, draws: list[Draw]) -> float | None:
    counts = [found for draw in draws if (found := passes.count_tokens(draw)) is not None]
    if not counts:
        return None
    tokens, padded = (sum(each) for each in zip(*counts, strict=True))
    return 1 - tokens / padded if padded else 0.0


def _score(draws: list[Draw], passes: Passes) -> float:
    """Return where batches are on the scale from consecutive items (0) to uniform samples (1).

    A cosine wave over the storage, averaged over a batch, is near zero if the batch is spread out and far from zero if
    its items are consecutive. Over uniform batches, the variance of that average is `1 / batch_size` of the variance
    over single items; for consecutive items it is known, too. Its inverse is the number of independent places in a
    batch, which the score scales.
    """
    n = passes.index.n_stored
    spread = passes.arrangement(draws[0].epoch if draws[0].epochs is None else int(draws[0].epochs[0])).spread
    places = [(draw.items + 0.5) / n if spread is None else spread(draw.items) for draw in draws]
    size = math.ceil(sum(len(draw) for draw in draws) / len(draws))
    if size < 2 or n < 2 * size:
        return _neighbour_score(np.concatenate(places) * n, n)
    # Waves whose half period holds at least two batches: finer ones would average out over consecutive items, too.
    frequency = np.arange(1, max(1, min(_WAVES, n // (4 * size))) + 1)
    observed = np.zeros(len(frequency))
    for place in places:
        # The more items, the smaller the square, in proportion; so batches of any size count as one of the usual size.
        observed += len(place) * _wave_mean(place, frequency) ** 2
    observed /= len(draws) * size
    runs = np.linspace(0, n - size, 257)[:, None] + np.arange(size)
    run = np.mean([_wave_mean((row + 0.5) / n, frequency) ** 2 for row in runs], axis=0)
    uniform = 0.5 / size * (n - size) / (n - 1)
    independent = np.mean(run) / max(float(np.mean(observed)), 1e-300)
    most = float(np.mean(run)) / uniform
    return float(np.clip((independent - 1) / max(most - 1, 1e-9), 0, 1))


def _wave_mean(place: NDArray[np.float64], frequency: NDArray[np.int64]) -> NDArray[np.float64]:
    mean: NDArray[np.float64] = np.cos(np.pi * place[:, None] * frequency).mean(axis=0)
    return mean


def _neighbour_score(places: NDArray[np.float64], n: int) -> float:
    """Return the mean distance of neighbours in the order, relative to uniform samples: for batches of one item."""
    if len(places) < 2 or n < 4:
        return 0.0
    distance = float(np.abs(np.diff(places)).mean())
    return float(np.clip((distance - 1) / ((n + 1) / 3 - 1), 0, 1))


def _window_cost(passes: Passes, number: int, max_windows: int) -> float:
    """Return the read amplification of the windows of pass `number`; a window that lanes share is read by each lane.

    Measured for at most `max_windows` windows, evenly spaced.
    """
    windows = passes.arrangement(number).windows
    assert windows is not None, "called for orders with windows only"
    n_batches = passes.n_batches
    lane_starts = slots(np.arange(min(passes.lanes, n_batches)), n_batches, passes.lanes) * passes.batch_size
    numbers = np.unique(np.linspace(0, windows.count - 1, min(windows.count, max_windows)).astype(np.int64))
    starts, stops = windows.starts(numbers), windows.starts(numbers + 1)
    read = 0
    for window, start, stop in zip(numbers.tolist(), starts.tolist(), stops.tolist(), strict=True):
        readers = 1 + int(((lane_starts > start) & (lane_starts < stop)).sum())
        held = passes.index.stored_spans(windows.spans(window))
        read += readers * int((held[:, 1] - held[:, 0]).sum())
    return float(read / (stops - starts).sum())


def _chunk_items(items: NDArray[np.int64], index: Index) -> int:
    # Of a selection, only selected items of a chunk count: the index does not know the others.
    chunks = np.unique(index.locate(index.find(items))[0])
    return int(index.chunk_sizes(chunks).sum())
