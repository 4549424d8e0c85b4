"""What an order looks like to a person: in words, as one hash, and as two numbers."""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.index import Index
from penstock.core.types import Draw
from penstock.plan.epoch import Epoch, Passes
from penstock.plan.world import slots

__all__ = ["Mixing", "explain_batch", "hash_order", "measure_mixing"]

_WAVES = 16  # independent looks at where a batch lies in storage; 16 bring the noise of 128 batches to about 3 %


@dataclass(frozen=True, slots=True)
class Mixing:
    """How good a shuffle is, and what it costs."""

    score: float
    """0: batches are runs of storage. 1: batches are as spread over the storage as uniform draws are."""

    read_amplification: float
    """Items in the chunks that are read, over items delivered; 1.0 where every chunk is read once."""

    batches_measured: int

    def __str__(self) -> str:
        return (
            f"mixing {self.score:.2f} (0 = storage order, 1 = uniform), reads {self.read_amplification:.2f}x the items "
            f"it delivers where only whole chunks can be read; {self.batches_measured} batches measured"
        )


def explain_batch(epoch: Epoch, batch: int) -> str:
    """Say in words what batch `batch` of `epoch` is."""
    draw = epoch.draw(batch)
    items = _listed(draw.items)
    words = [f"Batch {batch} of {epoch.n_batches} in epoch {epoch.number}: {len(draw)} items, {items}."]
    if draw.parts:
        for part in draw.parts:
            spans = ", ".join(f"{start}–{stop - 1}" for start, stop in part.window.spans[:4].tolist())
            more = f" and {len(part.window.spans) - 4} more spans" if len(part.window.spans) > 4 else ""
            words.append(
                f"{len(part.rows)} of them are rows of window {part.window.number} of pass {part.window.epoch}, "
                f"which holds items {spans}{more}."
            )
    else:
        words.append("They are taken directly.")
    if draw.mask is not None and not draw.mask.all():
        words.append(f"{int((~draw.mask).sum())} of them only fill up the batch (mask False).")
    if draw.epochs is not None and len(draw) and draw.epochs.min() != draw.epochs.max():
        words.append(f"It reaches over the end of pass {draw.epochs.min()}.")
    return " ".join(words)


def _listed(items: NDArray[np.int64]) -> str:
    shown = ", ".join(map(str, items[:8].tolist()))
    return shown if len(items) <= 8 else f"{shown}, …"


def hash_order(epoch: Epoch) -> str:
    """Return a hash of the items, batch borders and masks of `epoch`, in order."""
    digest = hashlib.blake2b(digest_size=8)
    for draw in epoch.draws(range(epoch.n_batches)):
        digest.update(len(draw).to_bytes(8, "little"))
        digest.update(draw.items.astype("<i8").tobytes())
        if draw.mask is not None:
            digest.update(np.packbits(draw.mask).tobytes())
    return digest.hexdigest()


def measure_mixing(epoch: Epoch, max_batches: int) -> Mixing:
    """Measure the batches of `epoch`, or `max_batches` consecutive ones of them."""
    count = min(epoch.n_batches, max_batches)
    draws = list(epoch.draws(range(count)))
    delivered = sum(len(draw) for draw in draws)
    if not delivered:
        return Mixing(0.0, 0.0, 0)
    if draws[0].parts:
        cost = _window_cost(epoch.passes, draws[0].parts[0].window.epoch, max_batches)
    else:
        cost = sum(_chunk_items(draw.items, epoch.passes.index) for draw in draws) / delivered
    return Mixing(_score(draws, epoch.passes.index), cost, count)


def _score(draws: list[Draw], index: Index) -> float:
    """Return how far batches are from runs of storage, on the way to uniform draws.

    A wave over the storage, averaged over a batch, is near zero if the batch is spread out and far from it if the batch
    is a run. The variance of that average over batches is `1 / batch_size` of one item's for uniform draws, and what a
    run gives is known; its inverse is the number of independent places in a batch, which is what the score scales.
    """
    n = index.n_stored
    size = max(len(draw) for draw in draws)
    if size < 2 or n < 2 * size:
        return _neighbour_score(draws, n)
    # Waves whose half period holds at least two batches: finer ones would average out in a run, too.
    frequency = np.arange(1, max(1, min(_WAVES, n // (4 * size))) + 1)
    observed = np.zeros(len(frequency))
    for draw in draws:
        observed += _wave_mean((draw.items + 0.5) / n, frequency) ** 2
    observed /= len(draws)
    runs = np.linspace(0, n - size, 257)[:, None] + np.arange(size)
    run = np.mean([_wave_mean((row + 0.5) / n, frequency) ** 2 for row in runs], axis=0)
    uniform = 0.5 / size * (n - size) / (n - 1)
    places = np.mean(run) / max(float(np.mean(observed)), 1e-300)
    most = float(np.mean(run)) / uniform
    return float(np.clip((places - 1) / max(most - 1, 1e-9), 0, 1))


def _wave_mean(place: NDArray[np.float64], frequency: NDArray[np.int64]) -> NDArray[np.float64]:
    mean: NDArray[np.float64] = np.cos(np.pi * place[:, None] * frequency).mean(axis=0)
    return mean


def _neighbour_score(draws: list[Draw], n: int) -> float:
    """Return the mean distance of neighbours in the order, over that of uniform draws: for batches of one item."""
    items = np.concatenate([draw.items for draw in draws])
    if len(items) < 2 or n < 4:
        return 0.0
    distance = float(np.abs(np.diff(items)).mean())
    return float(np.clip((distance - 1) / ((n + 1) / 3 - 1), 0, 1))


def _window_cost(passes: Passes, number: int, max_windows: int) -> float:
    """Return the items in the windows of pass `number`, over its positions; a window that lanes share is read by each.

    Worked out for at most `max_windows` windows, evenly spaced.
    """
    arrangement = passes.arrangement(number)
    starts, spans = arrangement.window_starts, arrangement.spans
    assert starts is not None, "called for orders with windows only"
    assert spans is not None, "an order with windows says which spans they hold"
    borders = np.append(starts, arrangement.length)
    n_batches = passes.n_batches
    lane_starts = slots(np.arange(min(passes.lanes, n_batches)), n_batches, passes.lanes) * passes.batch_size
    windows = np.unique(np.linspace(0, len(starts) - 1, min(len(starts), max_windows)).astype(np.int64))
    read = 0
    for window in windows.tolist():
        readers = 1 + int(((lane_starts > borders[window]) & (lane_starts < borders[window + 1])).sum())
        held = passes.index.stored_spans(spans(window))
        read += readers * int((held[:, 1] - held[:, 0]).sum())
    return float(read / (borders[windows + 1] - borders[windows]).sum())


def _chunk_items(items: NDArray[np.int64], index: Index) -> int:
    # A selection's chunks are counted by what is selected of them: the index knows no more of the storage.
    numbers = items if index.selected is None else np.searchsorted(index.selected, items)
    chunks = np.unique(index.locate(numbers)[0])
    return int(index.chunk_sizes(chunks).sum())
