"""Quantize audio to codes of a few bits, and back, on a fixed scale: a code means the same in every file.

Values are in -1 … 1 and codes in 0 … 2^bits - 1; 0.0 is exactly `q_zero(bits)`, both ways. Louder values are clipped to
-1 … 1.

`scale="item"` gives the codes of the functions of the same names in S4, bit for bit, for models trained on them: there,
the lowest value of an item becomes code 0 and the highest about the last one. That has no inverse, and gives the same
sound other codes in another window.

The functions take NumPy arrays and torch tensors and return the same kind, on the same device. They compute in double
precision, or with `scale="item"` in that of the values, so both kinds give the same codes.
"""

import math
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError

__all__ = [
    "Quantization",
    "Scale",
    "check_bits",
    "check_scale",
    "dequantize",
    "linear_decode",
    "linear_encode",
    "mu_law_decode",
    "mu_law_encode",
    "q_zero",
    "quantize",
]

Quantization = Literal["linear", "mu-law"]
Scale = Literal["fixed", "item"]

_Array = TypeVar("_Array", NDArray[Any], torch.Tensor)

_MAX_BITS = 16


def check_bits(bits: int) -> int:
    """Return `bits` as an int; raise OptionError unless it is from 1 to 16."""
    if check_integer("bits", bits, at_least=1) > _MAX_BITS:
        raise OptionError(f"bits must be an integer from 1 to {_MAX_BITS}, got {bits}.")
    return int(bits)


def check_scale(scale: str) -> None:
    """Raise OptionError unless `scale` is known."""
    if scale not in get_args(Scale):
        raise OptionError(f"scale must be 'fixed' or 'item', got {scale!r}.")


def q_zero(bits: int = 8) -> int:
    """Return the code of 0.0.

    Examples
    --------
    >>> q_zero(8)
    128
    """
    return 1 << (check_bits(bits) - 1)


def quantize(values: _Array, bits: int = 8, quantization: Quantization = "linear", *, scale: Scale = "fixed") -> _Array:
    """Return the codes of values, by `linear_encode` or `mu_law_encode`."""
    encode = mu_law_encode if _is_mu_law(quantization) else linear_encode
    return encode(values, bits, scale=scale)


def dequantize(codes: _Array, bits: int = 8, quantization: Quantization = "linear") -> _Array:
    """Return the values of codes, by `linear_decode` or `mu_law_decode`."""
    return mu_law_decode(codes, bits) if _is_mu_law(quantization) else linear_decode(codes, bits)


def linear_encode(values: _Array, bits: int = 8, *, scale: Scale = "fixed") -> _Array:
    """Return the nearest code of each value, in equal steps of 2 / 2^bits, as int64.

    Values below -1 and above 1 are clipped. The highest code stands for one step below 1, so 1 is off by one step;
    values with lower codes are off by at most half a step. `scale="item"` spreads the codes between the lowest and the
    highest of the values instead, as S4 does.

    Examples
    --------
    >>> linear_encode(np.array([-1.0, 0.0, 0.5, 1.0, 7.0])).tolist()
    [0, 128, 192, 255, 255]
    >>> linear_encode(np.array([0.0, 0.02, -0.02, 0.01], np.float32), scale="item").tolist()
    [127, 255, 0, 191]
    """
    zero = q_zero(bits)
    check_scale(scale)
    codes: _Array = _item_codes(values, zero, mu_law=False) if scale == "item" else _codes(_doubles(values), zero)
    return codes


def linear_decode(codes: _Array, bits: int = 8) -> _Array:
    """Return the value of each code as float32, exactly.

    Examples
    --------
    >>> linear_decode(np.array([0, 128, 192, 255])).tolist()
    [-1.0, 0.0, 0.5, 0.9921875]
    """
    values: _Array = _as(_steps(codes, q_zero(bits)), "float32")
    return values


def mu_law_encode(values: _Array, bits: int = 8, *, scale: Scale = "fixed") -> _Array:
    """Return the nearest code of each value, in steps that grow with the value, as int64.

    Steps are equal in `sign(x) log(1 + mu |x|) / log(1 + mu)` with mu = 2^bits - 1, so quiet values get fine steps.
    With `scale="item"`, x runs from -1 at the lowest of the values to 1 at the highest, as in S4.

    Examples
    --------
    >>> mu_law_encode(np.array([-1.0, -0.01, 0.0, 0.01, 1.0])).tolist()
    [0, 99, 128, 157, 255]
    """
    zero = q_zero(bits)
    check_scale(scale)
    codes: _Array
    if scale == "item":
        codes = _item_codes(values, zero, mu_law=True)
        return codes
    mu, x = 2 * zero - 1, _doubles(values)
    kind = _kind(x)
    x = kind.clip(x, -1, 1)
    codes = _codes(kind.sign(x) * kind.log1p(mu * kind.abs(x)) / math.log1p(mu), zero)
    return codes


def mu_law_decode(codes: _Array, bits: int = 8) -> _Array:
    """Return the value of each code as float32.

    Examples
    --------
    >>> [f"{value:.3f}" for value in mu_law_decode(np.array([0, 128, 129, 255]))]
    ['-1.000', '0.000', '0.000', '0.957']
    """
    zero = q_zero(bits)
    mu, y = 2 * zero - 1, _steps(codes, zero)
    kind = _kind(y)
    values: _Array = _as(kind.sign(y) * kind.expm1(kind.abs(y) * math.log1p(mu)) / mu, "float32")
    return values


def _is_mu_law(quantization: str) -> bool:
    if quantization not in get_args(Quantization):
        raise OptionError(f"quantization must be 'linear' or 'mu-law', got {quantization!r}.")
    return quantization == "mu-law"


def _kind(array: Any) -> Any:
    """Return the library of an array: torch or NumPy. All functions used here have the same names in both."""
    return torch if isinstance(array, torch.Tensor) else np


def _as(array: Any, dtype: str) -> Any:
    return array.to(getattr(torch, dtype)) if isinstance(array, torch.Tensor) else array.astype(dtype)


def _floats(values: Any) -> Any:
    given = values.detach() if isinstance(values, torch.Tensor) else np.asarray(values)
    floating = given.is_floating_point() if isinstance(given, torch.Tensor) else given.dtype.kind == "f"
    if not floating:
        raise OptionError(f"Values to encode must be floating-point numbers in -1 … 1, got {given.dtype}.")
    return given


def _item_codes(values: Any, zero: int, *, mu_law: bool) -> Any:
    """Return the codes of S4: each step is done as there, and in torch, so that every bit is the same."""
    given = _floats(values)
    x = given if isinstance(given, torch.Tensor) else torch.tensor(given)
    if not bool(torch.isfinite(x).all()):
        raise OptionError("Values to encode must be finite: an item with NaN or an infinity has no highest value.")
    if x.numel():
        low, high = (-1, 1) if mu_law else (0, 1)
        x = low + (high - low) * (x - x.min()) / (x.max() - x.min() + 1e-6)
        if mu_law:
            mu = torch.tensor(2 * zero - 1)
            x = (torch.sign(x) * (torch.log1p(mu * torch.abs(x + 1e-8)) / torch.log1p(mu)) + 1) / 2
    codes = (x * (2 * zero - 0.01) + 0.005).long()
    return codes if isinstance(given, torch.Tensor) else codes.numpy()


def _doubles(values: Any) -> Any:
    doubles = _as(_floats(values), "float64")
    if bool(_kind(doubles).isnan(doubles).any()):
        raise OptionError(
            "Values to encode must not contain NaN, which has no code. Replace or leave out unknown values."
        )
    return doubles


def _codes(y: Any, zero: int) -> Any:
    """Return the nearest codes of values in -1 … 1."""
    kind = _kind(y)
    # Clip before multiplying: an infinity has no code.
    steps = kind.round(kind.clip(y, -1, 1) * zero)
    return _as(kind.clip(steps + zero, 0, 2 * zero - 1), "int64")


def _steps(codes: Any, zero: int) -> Any:
    """Return the places of codes in -1 … 1."""
    given = codes.detach() if isinstance(codes, torch.Tensor) else np.asarray(codes)
    if isinstance(given, torch.Tensor):
        integer = not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
    else:
        integer = given.dtype.kind in "iu"
    if not integer:
        raise OptionError(f"Codes must be integers in 0 … {2 * zero - 1}, got {given.dtype}.")
    if math.prod(given.shape):
        low, high = int(given.min()), int(given.max())
        if low < 0 or high >= 2 * zero:
            raise OptionError(f"Codes must be integers in 0 … {2 * zero - 1}, got {low} … {high}.")
    return _as(given, "float64") / zero - 1
