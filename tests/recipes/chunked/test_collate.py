"""Batches of audio of different lengths; batches of a whole dataset are in test_audio.py."""

import pytest
import torch

from penstock.core.errors import OptionError
from penstock.recipes.chunked.audio import collate_audio


def test_values_are_filled_up_with_what_no_loss_overlooks():
    items = [(torch.zeros(n, 1), torch.ones(n, 1)) for n in (2, 3)]
    x, y, _ = collate_audio(items)
    assert x[0, :, 0].tolist() == [0, 0, 0]
    assert y[0, :2, 0].tolist() == [1, 1]
    assert torch.isnan(y[0, 2]).all()
    assert collate_audio(items, zero=0.5, ignore=-1.0)[1][0, :, 0].tolist() == [1, 1, -1]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ([], "at least one item"),
        ([(torch.zeros(2, 1), torch.zeros(2, 1), 0)], "pairs"),
        ([(torch.zeros(2, 1), torch.zeros(2, 1)), (torch.zeros(2, 2), torch.zeros(2, 1))], "All x of a batch"),
        ([(torch.zeros(2, 1), torch.zeros(2, 1)), (torch.zeros(2, 1), torch.zeros(2, 1).long())], "All y of a batch"),
    ],
)
def test_items_that_do_not_fit_together_are_refused(batch, words):
    with pytest.raises(OptionError, match=words):
        collate_audio(batch)
    with pytest.raises(OptionError, match=r"padding of x must be an integer, since x is torch\.int64, got 0\.5"):
        collate_audio([torch.zeros(2, 1).long()], zero=0.5)
