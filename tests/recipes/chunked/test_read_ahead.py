"""Quantized audio is read ahead as its files are, by the numbers of the source."""

from pathlib import Path

import numpy as np
import soundfile
import torch
from penstock_hint_checks import check_given_back, check_read_ahead

from penstock.recipes.chunked.audio import QuantizedAudioDataset
from penstock.source.dataset import DatasetSource


def test_items_of_the_dataset_are_items_of_its_files(tmp_path: Path) -> None:
    frames = np.arange(20_000, dtype=np.int16)
    for number, length in enumerate((3, 20_000, 19_000)):  # the first one has nothing to predict
        soundfile.write(tmp_path / f"{number}.wav", frames[:length], 8_000)
    dataset = QuantizedAudioDataset(tmp_path, 16, context_len=10)
    assert len(dataset) == 2
    source = DatasetSource(dataset)
    wanted = dataset[0]
    dataset.source.close()
    place = [(tmp_path / "1.wav", 0, 40_044)]
    check_read_ahead(tmp_path, lambda: source.prepare(np.array([0])), place)
    check_given_back(lambda: source.release(np.array([0])), place)
    assert all(torch.equal(a, b) for a, b in zip(dataset[0], wanted, strict=True))
    assert source.stored_bytes == 3 * 44 + 2 * (3 + 20_000 + 19_000)
