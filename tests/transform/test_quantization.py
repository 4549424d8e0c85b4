"""Quantization and back: every code of every width, for NumPy and torch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import OptionError
from penstock.transform.quantization import (
    dequantize,
    linear_decode,
    linear_encode,
    mu_law_decode,
    mu_law_encode,
    q_zero,
    quantize,
)

CODES = {"linear": (linear_encode, linear_decode), "mu-law": (mu_law_encode, mu_law_decode)}
WIDTHS = range(1, 17)
values = st.floats(-1, 1, width=32)


def compand(x: float, bits: int) -> float:
    mu = 2**bits - 1
    return math.copysign(math.log1p(mu * abs(x)) / math.log1p(mu), x)


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("bits", WIDTHS)
def test_every_code_comes_back_from_its_value(name, bits):
    encode, decode = CODES[name]
    codes = np.arange(1 << bits)
    decoded = decode(codes, bits)
    assert decoded.dtype == np.float32
    assert (np.diff(decoded) > 0).all(), "louder codes are louder values"
    assert decoded.min() == -1
    assert decoded.max() < 1
    assert decoded[q_zero(bits)] == 0
    for again in (encode(decoded, bits), encode(decoded.astype(np.float64), bits)):
        assert again.dtype == np.int64
        np.testing.assert_array_equal(again, codes)
    tensors = decode(torch.from_numpy(codes), bits)
    assert tensors.dtype == torch.float32
    np.testing.assert_allclose(tensors.numpy(), decoded, rtol=1e-6, atol=0)
    found = encode(tensors, bits)
    assert found.dtype == torch.int64
    np.testing.assert_array_equal(found.numpy(), codes)


@pytest.mark.parametrize("name", CODES)
@given(x=st.lists(values, max_size=20), bits=st.sampled_from(WIDTHS))
def test_a_value_is_off_by_a_step_at_most_and_by_half_a_step_below_the_highest_code(name, x, bits):
    encode, decode = CODES[name]
    step = 2 / 2**bits
    codes = encode(np.array(x, np.float32), bits)
    assert codes.tolist() == encode(torch.tensor(x, dtype=torch.float32), bits).tolist()
    for value, code, decoded in zip(x, codes.tolist(), decode(codes, bits).tolist(), strict=True):
        assert 0 <= code < 2**bits
        near = float(np.nextafter(np.float32(decoded), np.float32(2)))  # what is decoded is a float32
        places = [value, decoded, near]
        if name == "mu-law":  # whose steps are even there
            places = [compand(place, bits) for place in places]
        highest = code == 2**bits - 1
        assert abs(places[0] - places[1]) <= (step if highest else step / 2) * (1 + 1e-5) + abs(places[2] - places[1])


@pytest.mark.parametrize("name", CODES)
@given(x=st.lists(values, min_size=2, max_size=20), bits=st.sampled_from(WIDTHS))
def test_codes_rise_with_values(name, x, bits):
    assert (np.diff(CODES[name][0](np.sort(np.array(x, np.float32)), bits)) >= 0).all()


@pytest.mark.parametrize("bits", WIDTHS)
def test_zero_is_the_code_in_the_middle(bits):
    assert q_zero(bits) == 1 << (bits - 1)
    for encode, decode in CODES.values():
        assert encode(np.zeros(1), bits).tolist() == [q_zero(bits)]
        assert encode(torch.zeros(1), bits).tolist() == [q_zero(bits)]
        assert decode(np.array([q_zero(bits)]), bits).tolist() == [0.0]


def test_codes_are_those_of_the_formula():
    x = np.random.default_rng(1).uniform(-1, 1, (4, 50)).astype(np.float32)
    linear = [[min(255, round(float(v) * 128) + 128) for v in row] for row in x]
    assert linear_encode(x).tolist() == quantize(x).tolist() == linear
    mu_law = [[min(255, round(compand(float(v), 8) * 128) + 128) for v in row] for row in x]
    assert mu_law_encode(x, 8).tolist() == quantize(x, 8, "mu-law").tolist() == mu_law
    assert dequantize(np.array(linear), 8).tolist() == linear_decode(np.array(linear)).tolist()
    assert dequantize(np.array(mu_law), 8, "mu-law").tolist() == mu_law_decode(np.array(mu_law)).tolist()


def test_samples_of_16_bits_are_kept_exactly():
    stored = np.arange(-(1 << 15), 1 << 15)
    values = (stored / 2**15).astype(np.float32)
    np.testing.assert_array_equal(linear_encode(values, 16), stored + (1 << 15))
    np.testing.assert_array_equal(linear_decode(linear_encode(values, 16), 16), values)


@pytest.mark.parametrize("encode", [linear_encode, mu_law_encode])
def test_louder_values_are_clipped_and_arguments_stay_as_they_are(encode):
    x = np.array([-np.inf, -3, -1, 1, 1.5, np.inf])
    assert encode(x).tolist() == [0, 0, 0, 255, 255, 255]
    assert x.tolist() == [-np.inf, -3, -1, 1, 1.5, np.inf]
    tensor = torch.tensor([-3.0, 3.0], requires_grad=True)
    assert encode(tensor).tolist() == [0, 255]
    assert tensor.tolist() == [-3, 3]
    half = encode(torch.tensor([[0.5], [-0.5]], dtype=torch.float16), 2)
    assert half.shape == (2, 1)
    assert encode(np.empty((0, 3), np.float32)).shape == (0, 3)


@pytest.mark.parametrize("name", CODES)
def test_values_without_a_code_and_codes_without_a_value_are_refused(name):
    encode, decode = CODES[name]
    for kind in (np.array, torch.tensor):
        with pytest.raises(OptionError, match="NaN"):
            encode(kind([0.0, np.nan]))
        with pytest.raises(OptionError, match=r"must be floating-point numbers in -1 … 1, got .*int64"):
            encode(kind([1, 2]))
        for codes in ([-1, 0], [256]):
            with pytest.raises(OptionError, match=rf"Codes must be integers in 0 … 255, got {codes[0]} … {codes[-1]}"):
                decode(kind(codes))
        for codes in ([0.0], [True]):
            with pytest.raises(OptionError, match="Codes must be integers in 0 … 255, got "):
                decode(kind(codes))
    assert decode(np.array([7], np.uint8)).tolist() == decode(torch.tensor([7], dtype=torch.uint8)).tolist()
    assert decode(np.empty(0, np.int64)).tolist() == []
    for bits in (0, 17, -1, 8.0, True, None):
        for call in (encode, decode):
            with pytest.raises(OptionError, match=f"bits must be an integer .*, got {bits!r}"):
                call(np.zeros(1), bits)


def test_other_options_are_refused():
    with pytest.raises(OptionError, match="quantization must be one of 'linear', 'mu-law', got 'a-law'"):
        quantize(np.zeros(1), 8, "a-law")
    with pytest.raises(OptionError, match=r"quantization must be .*, got None"):
        dequantize(np.zeros(1, np.int64), 8, None)
    with pytest.raises(OptionError, match="bits must be an integer from 1 to 16, got 17"):
        q_zero(17)
    with pytest.raises(OptionError, match="scale must be one of 'fixed', 'item', got 'file'"):
        quantize(np.zeros(1), scale="file")
    for value in (np.nan, np.inf):
        with pytest.raises(OptionError, match="must be finite"):
            mu_law_encode(np.array([0.0, value]), scale="item")
    assert linear_encode(np.empty((0, 3), np.float32), scale="item").shape == (0, 3)
