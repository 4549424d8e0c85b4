"""What of a data set cannot go to a worker process, told before one is started."""

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

from penstock.core.errors import OptionError

__all__ = ["check_picklable"]


def check_picklable(owner: Any, **parts: Any) -> None:
    """Raise OptionError that names the part which cannot be pickled; arrays and tensors are not looked into."""
    for name, part in parts.items():
        try:
            _Trial(io.BytesIO(), pickle.HIGHEST_PROTOCOL).dump(part)
        except OptionError:
            raise  # a data set within this one has told already
        except Exception as error:
            raise OptionError(
                f"The {name} {part!r} of {owner!r} cannot be pickled, which workers that are not forked need: {error}. "
                "Define it at the top of a module (no lambda, no local function), or use "
                "multiprocessing_context='fork' or num_workers=0."
            ) from error


class _Trial(ForkingPickler):
    """Pickles as a process that is started would, except for the bulk of the data."""

    def reducer_override(self, part: Any) -> Any:
        bulk = isinstance(part, torch.Tensor) or (isinstance(part, np.ndarray) and not part.dtype.hasobject)
        return (int, ()) if bulk else NotImplemented
