"""Augmentation strength by dataset size: rules of thumb to start with."""

from typing import Any

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError

__all__ = ["get_augmentation_params", "get_recommended_params"]


def get_recommended_params(
    num_samples: int, num_classes: int, input_size: tuple[int, int] = (224, 313)
) -> dict[str, Any]:
    """Return arguments of `SpecAugment` for this many samples: the fewer per class, the weaker.

    Parameters
    ----------
    input_size
        (frequency bins, time columns) of a spectrogram; masks are at most a fraction of it.

    Examples
    --------
    >>> get_recommended_params(1000, 31)
    {'time_mask_param': 25, 'freq_mask_param': 10, 'num_time_masks': 1, 'num_freq_masks': 1, 'p': 0.6}
    """
    check_integer("num_samples", num_samples, at_least=1)
    check_integer("num_classes", num_classes, at_least=1)
    if not isinstance(input_size, tuple | list) or len(input_size) != 2:
        raise OptionError(f"input_size must be (frequency bins, time columns), got {input_size!r}.")
    n_bins, n_columns = (check_integer("input_size", size, at_least=1) for size in input_size)
    per_class = num_samples / num_classes
    if per_class < 50:
        time, freq, p, n_time = min(25, n_columns // 12), min(10, n_bins // 20), 0.6, 1
    elif per_class < 100:
        time, freq, p, n_time = min(40, n_columns // 8), min(15, n_bins // 15), 0.8, 1
    else:
        time, freq, p, n_time = min(50, n_columns // 6), min(20, n_bins // 12), 0.9, 2
    return {"time_mask_param": time, "freq_mask_param": freq, "num_time_masks": n_time, "num_freq_masks": 1, "p": p}


def get_augmentation_params(
    size: int, classes: int, aggressive: bool = False, *, input_size: tuple[int, int] = (224, 313)
) -> dict[str, dict[str, Any]]:
    """Return arguments of `SpecAugment` and `GaussianNoise` for `size` samples of `classes` classes.

    `aggressive` adds a mask on each axis, doubles the noise, and changes more of the items.

    Examples
    --------
    >>> get_augmentation_params(1000, 31)["gaussian_noise_params"]
    {'std': 0.02, 'p': 0.8}
    """
    masks = get_recommended_params(size, classes, input_size)
    noise = {"std": 0.02, "p": 0.8}
    if aggressive:
        more = {name: masks[name] + 1 for name in ("num_time_masks", "num_freq_masks")}
        masks = {**masks, **more, "p": min(1.0, round(masks["p"] + 0.1, 1))}
        noise = {"std": 0.04, "p": 0.9}
    return {"spec_augment_params": masks, "gaussian_noise_params": noise}
