"""Classify bird species by their song, whoever recorded it: `python examples/birdsong.py --help`.

Generates chirps: the species is the shape of a chirp, and each author of recordings adds their own noise, loudness and
pitch. A network that learns the authors is right about them and wrong about everyone else. So it is trained on four
folds, each validated on authors that it has never heard, with SpecAugment. It takes about a minute on two cores.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from penstock.recipes import crossval

RATE_HZ = 8000
SAMPLES = 5120  # of a segment: 0.64 s
WINDOW, HOP = 256, 80
LOW_BIN, BINS = 8, 96  # from 250 Hz to 3250 Hz, averaged in pairs
CALLS = 3  # recordings of one author of one species
SEGMENTS = 4  # of one recording

# Frequency over a chirp, in Hz, as a function of time from 0 to 1.
SPECIES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "riser": lambda t: 1200 + 1200 * t,
    "faller": lambda t: 2400 - 1200 * t,
    "arch": lambda t: 1200 + 1200 * np.sin(np.pi * t),
    "dip": lambda t: 2400 - 1200 * np.sin(np.pi * t),
    "trill": lambda t: 1800 + 450 * np.sin(2 * np.pi * 7 * t),
    "two-note": lambda t: np.where(t < 0.5, 1400.0, 2200.0),
}


def chirp(species: str, pitch: float, rng: np.random.Generator) -> np.ndarray:
    """Return a chirp somewhere in a segment."""
    length = int(rng.uniform(0.5, 0.75) * SAMPLES)
    frequency = SPECIES[species](np.linspace(0, 1, length)) * pitch * rng.uniform(0.97, 1.03)
    sound = np.sin(2 * np.pi * np.cumsum(frequency) / RATE_HZ + rng.uniform(0, 2 * np.pi)) * np.hanning(length) ** 0.3
    segment = np.zeros(SAMPLES)
    begin = int(rng.integers(0, SAMPLES - length))
    segment[begin : begin + length] = sound
    return segment


def noise(slope: float, rng: np.random.Generator) -> np.ndarray:
    """Return noise of deviation 1 whose power goes with frequency to the -slope: 0 is white, 2 is brown."""
    spectrum = np.fft.rfft(rng.standard_normal(SAMPLES))
    spectrum /= np.maximum(np.arange(len(spectrum)), 8.0) ** (slope / 2)
    made = np.fft.irfft(spectrum, SAMPLES)
    return made / made.std()


def spectrogram(sound: np.ndarray) -> np.ndarray:
    """Return the logarithm of the power, as (1, frequency, time)."""
    frames = np.lib.stride_tricks.sliding_window_view(sound, WINDOW)[::HOP] * np.hanning(WINDOW)
    power = np.abs(np.fft.rfft(frames, axis=1)[:, LOW_BIN : LOW_BIN + BINS].T) ** 2
    return np.log(power.reshape(BINS // 2, 2, -1).mean(axis=1) + 1e-4)[None].astype(np.float32)


def generate(n_authors: int, seed: int) -> dict[str, np.ndarray]:
    """Return spectrograms, with the species, the author and the recording of each."""
    rng = np.random.default_rng(seed)
    names, found = list(SPECIES), []
    for author in range(n_authors):
        pitch, loudness, slope = rng.uniform(0.85, 1.2), np.exp(rng.normal(0, 1)), rng.uniform(0, 2)
        # Each author likes half of the species, so that the author alone says much about the species.
        for species in rng.choice(names, len(names) // 2, replace=False):
            for call in range(CALLS):
                faintness = rng.uniform(0.5, 1.8)
                for _ in range(SEGMENTS):
                    sound = loudness * (chirp(species, pitch, rng) + faintness * noise(slope, rng))
                    recording = f"author {author:02} {species} {call}"
                    found.append((spectrogram(sound), species, f"author {author:02}", recording))
    features, labels, authors, recordings = zip(*found, strict=True)
    return {
        "features": np.stack(features),
        "labels": np.array(labels),
        "authors": np.array(authors),
        "recordings": np.array(recordings),
    }


class SmallCnn(nn.Module):
    """Three convolutions, and a mean over time: when a bird sings does not matter."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.look = nn.Sequential(
            nn.Conv2d(1, 12, 5, stride=2, padding=2), nn.BatchNorm2d(12), nn.ReLU(),
            nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
            nn.Conv2d(24, 48, 3, stride=2, padding=1), nn.BatchNorm2d(48), nn.ReLU(),
        )  # fmt: skip
        self.decide = nn.Sequential(nn.Dropout(0.3), nn.Linear(48 * 3, num_classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score for each species, of spectrograms (batch, 1, frequency, time)."""
        seen = self.look(x)
        return self.decide(nn.functional.adaptive_max_pool2d(seen, (3, 1)).flatten(1))


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Generate, train and tell; return the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--authors", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, help="processes that make batches (default: what suits this machine)")
    parser.add_argument("--out", type=Path, help="a folder for summary.json and checkpoints to resume from")
    parser.add_argument("--quick", action="store_true", help="few authors and epochs: a few seconds, and worse")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.authors, chosen.epochs, chosen.folds = 12, 8, 2
    torch.set_num_threads(1)  # the network is so small that a second thread costs more than it does
    began = time.perf_counter()
    data = generate(chosen.authors, chosen.seed)
    shape = "×".join(map(str, data["features"].shape[1:]))
    print(
        f"{len(data['labels']):,} spectrograms of {shape}: {len(SPECIES)} species, {chosen.authors} authors who each "
        f"recorded {len(SPECIES) // 2} of them ({time.perf_counter() - began:.1f} s)"
    )
    results, _ = crossval.cross_val_training(
        **data,
        model_class=SmallCnn,
        config={
            "k_folds": chosen.folds,
            "num_epochs": chosen.epochs,
            "early_stopping": 8,
            "batch_size": 12 if chosen.quick else 32,
            "learning_rate": 0.003,
            "standardize_axis": -2,  # each frequency has its own noise
            "max_split_attempts": 2000,
            "seed": chosen.seed,
            "spec_augment": {"time_mask_param": 12, "freq_mask_param": 6, "p": 0.8},
            "loader_options": {} if chosen.workers is None else {"num_workers": chosen.workers},
            "checkpoint_dir": chosen.out and chosen.out / "checkpoints",
        },
    )
    split, summary = results["split"], results["summary"]
    print(
        f"The best folds of 2,000 attempts are {split['score']:.0%} from equal shares of each species (attempt "
        f"{split['seed']}); no author is on both sides.\n"
    )
    for number, fold in enumerate(results["fold_results"].values(), 1):
        print(f"Fold {number}: {fold['final_val_acc']:.1%} of {len(fold['val_indices'])} segments are right.")
    waited = float(np.mean([fold["waiting_share"] for fold in results["fold_results"].values()]))
    bound = "it is bound by its data: try --workers 2" if waited > 0.3 else "its data is not what holds it up"
    print(
        f"\nChance is {1 / len(SPECIES):.0%}. Of single segments, {summary['mean_val_accuracy']:.0%} are right; of "
        f"recordings, {summary['aggregated_accuracy']:.0%}.\n"
        f"The training waited {waited:.0%} of its time for batches; {bound}. "
        f"All took {time.perf_counter() - began:.0f} s."
    )
    if chosen.out:
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "summary.json").write_text(json.dumps(summary, default=np.ndarray.tolist))
    return {
        "accuracy": summary["mean_val_accuracy"],
        "recording_accuracy": summary["aggregated_accuracy"],
        "waiting_share": waited,
    }


if __name__ == "__main__":
    main()
