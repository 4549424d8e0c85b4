"""Check before workers start that everything they need can be pickled."""

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

from penstock.core.errors import OptionError

__all__ = ["check_picklable"]


def check_picklable(owner: Any, **parts: Any) -> None:
    """Raise OptionError that names the part that cannot be pickled; contents of arrays and tensors are skipped."""
    for name, part in parts.items():
        try:
            _Trial(io.BytesIO(), pickle.HIGHEST_PROTOCOL).dump(part)
        except OptionError:
            raise  # a dataset inside this one has reported it
        except Exception as error:
            raise OptionError(
                f"The {name} {part!r} of {owner!r} must be picklable for workers that are not forked: {error}. "
                "Define it at the top of a module (no lambda, no local function), or use "
                "multiprocessing_context='fork' or num_workers=0."
            ) from error


class _Trial(ForkingPickler):
    """Pickles as for a worker process, but without the contents of arrays and tensors."""

    def reducer_override(self, part: Any) -> Any:
        bulk = isinstance(part, torch.Tensor) or (isinstance(part, np.ndarray) and not part.dtype.hasobject)
        return (int, ()) if bulk else NotImplemented
