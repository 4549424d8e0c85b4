"""Quantize audio to codes of a few bits, and back, on a fixed scale: a code means the same in every file.

Values are in -1 … 1 and codes in 0 … 2^bits - 1; 0.0 is exactly `q_zero(bits)`, both ways. Louder values are clipped to
-1 … 1.

`scale="item"` gives the codes of the functions of the same names in S4, bit for bit, for models trained on them: there,
the lowest value of an item becomes code 0 and the highest about the last one. That has no inverse, and gives the same
sound other codes in another window.

The functions take NumPy arrays and torch tensors and return the same kind, on the same device. All arithmetic is
NumPy's, in double precision, or with `scale="item"` torch's, in that of the values, so both kinds give the same codes.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.checks import check_choice, check_integer
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
    check_choice("scale", scale, Scale)


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
    encodes = {"linear": linear_encode, "mu-law": mu_law_encode}
    codes: _Array = encodes[check_choice("quantization", quantization, Quantization)](values, bits, scale=scale)
    return codes


def dequantize(codes: _Array, bits: int = 8, quantization: Quantization = "linear") -> _Array:
    """Return the values of codes, by `linear_decode` or `mu_law_decode`."""
    decodes = {"linear": linear_decode, "mu-law": mu_law_decode}
    values: _Array = decodes[check_choice("quantization", quantization, Quantization)](codes, bits)
    return values


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
    return _item_codes(values, zero, mu_law=False) if scale == "item" else _encode(values, lambda x: x, zero)


def linear_decode(codes: _Array, bits: int = 8) -> _Array:
    """Return the value of each code as float32, exactly.

    Examples
    --------
    >>> linear_decode(np.array([0, 128, 192, 255])).tolist()
    [-1.0, 0.0, 0.5, 0.9921875]
    """
    return _decode(codes, lambda y: y, q_zero(bits))


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
    mu = 2 * zero - 1
    if scale == "item":
        return _item_codes(values, zero, mu_law=True)
    return _encode(values, lambda x: np.sign(x) * np.log1p(mu * np.abs(x)) / math.log1p(mu), zero)


def mu_law_decode(codes: _Array, bits: int = 8) -> _Array:
    """Return the value of each code as float32.

    Examples
    --------
    >>> [f"{value:.3f}" for value in mu_law_decode(np.array([0, 128, 129, 255]))]
    ['-1.000', '0.000', '0.000', '0.957']
    """
    zero = q_zero(bits)
    mu = 2 * zero - 1
    return _decode(codes, lambda y: np.sign(y) * np.expm1(np.abs(y) * math.log1p(mu)) / mu, zero)


def _by_numpy(given: _Array, function: Callable[[NDArray[Any]], Any]) -> _Array:
    """Return what NumPy makes of an array or tensor, as one of the same kind."""
    if isinstance(given, torch.Tensor):
        plain = given.detach().cpu()
        found = function((plain.float() if plain.dtype == torch.bfloat16 else plain).numpy())
        return torch.as_tensor(found).to(given.device)
    made: _Array = function(np.asarray(given))
    return made


def _check_floats(dtype: Any, *, floating: bool) -> None:
    if not floating:
        raise OptionError(f"Values to encode must be floating-point numbers in -1 … 1, got {dtype}.")


def _item_codes(values: _Array, zero: int, *, mu_law: bool) -> _Array:
    """Return the codes of S4: each step is done as there, and in torch, so that every bit is the same."""
    given = values.detach() if isinstance(values, torch.Tensor) else np.asarray(values)
    x = given if isinstance(given, torch.Tensor) else torch.tensor(given)
    _check_floats(given.dtype, floating=x.is_floating_point())
    if not bool(torch.isfinite(x).all()):
        raise OptionError("Values to encode must be finite: an item with NaN or an infinity has no highest value.")
    if x.numel():
        low, high = (-1, 1) if mu_law else (0, 1)
        x = low + (high - low) * (x - x.min()) / (x.max() - x.min() + 1e-6)
        if mu_law:
            mu = torch.tensor(2 * zero - 1)
            x = (torch.sign(x) * (torch.log1p(mu * torch.abs(x + 1e-8)) / torch.log1p(mu)) + 1) / 2
    found = (x * (2 * zero - 0.01) + 0.005).long()
    codes: Any = found if isinstance(given, torch.Tensor) else found.numpy()
    return codes  # type: ignore[no-any-return]  # of the kind of the values


def _encode(values: _Array, place: Callable[[NDArray[np.float64]], Any], zero: int) -> _Array:
    """Return the nearest codes of values, at their places in -1 … 1."""

    def encode(given: NDArray[Any]) -> Any:
        _check_floats(given.dtype, floating=given.dtype.kind == "f")
        x = given.astype(np.float64)
        if np.isnan(x).any():
            raise OptionError(
                "Values to encode must not contain NaN, which has no code. Replace or leave out unknown values."
            )
        # Clip before multiplying: an infinity has no code.
        steps = np.round(np.clip(place(np.clip(x, -1, 1)), -1, 1) * zero)
        return np.clip(steps + zero, 0, 2 * zero - 1).astype(np.int64)

    return _by_numpy(values, encode)


def _decode(codes: _Array, value: Callable[[NDArray[np.float64]], Any], zero: int) -> _Array:
    """Return the values, as float32, at the places of codes in -1 … 1."""

    def decode(given: NDArray[Any]) -> Any:
        if given.dtype.kind not in "iu":
            raise OptionError(f"Codes must be integers in 0 … {2 * zero - 1}, got {given.dtype}.")
        if given.size:
            low, high = int(given.min()), int(given.max())
            if low < 0 or high >= 2 * zero:
                raise OptionError(f"Codes must be integers in 0 … {2 * zero - 1}, got {low} … {high}.")
        return value(given.astype(np.float64) / zero - 1).astype(np.float32)

    return _by_numpy(codes, decode)
