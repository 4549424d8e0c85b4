"""Values come back as they went in, bit for bit; values that would change are refused by name."""

import io
import json
import math
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.core.errors import OptionError
from penstock.shard.codec import encode, json_bytes, parse_npy_header
from penstock.shard.decoders.decode import decode, is_uncompressed
from tests.shard.samples import Side


def payload(value: Any, **options: Any) -> bytes:
    stored = encode("field", value, **options)
    joined = b"".join(bytes(buffer) for buffer in stored.buffers)
    assert stored.size == len(joined)
    return joined


def round_trip(value: Any, **options: Any) -> Any:
    return decode(encode("field", value, **options).extension, payload(value, **options))


def same(found: Any, given_array: np.ndarray[Any, Any]) -> None:
    """Check equality bit for bit, with NaNs and signed zeros; native byte order and C order."""
    assert found.dtype == given_array.dtype.newbyteorder("=")
    assert found.shape == given_array.shape
    expected = given_array.astype(found.dtype)
    if found.dtype.names is None:
        assert found.tobytes() == expected.tobytes()
    else:  # padding between fields is arbitrary
        assert all(found[name].tobytes() == expected[name].tobytes() for name in found.dtype.names)


# -- arrays ------------------------------------------------------------------------------------------------------------

STRUCTURED = np.dtype([("time", "<f8"), ("unit", ">i4"), ("name", "<U3"), ("xy", "<i2", (2,))])


PADDED = np.dtype({"names": ["a", "b"], "formats": ["u1", "<f4"], "offsets": [0, 4], "itemsize": 12})


ARRAYS = {
    "bool": np.array([True, False, True]),
    **{kind: np.array([0, 1, 100], kind) for kind in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")},
    **{kind: np.array([0.0, -0.0, np.nan, np.inf, 1.5], kind) for kind in ("f2", "f4", "f8")},
    "longdouble": np.array([1, 2], np.longdouble) / 3,
    **{kind: np.array([1 + 2j, complex(np.nan, -0.0)], kind) for kind in ("c8", "c16")},
    "large unsigned": np.array([2**64 - 1], np.uint64),
    "big-endian": np.arange(5, dtype=">f8"),
    "big-endian dates": np.array(["2026-01-02"], ">M8[D]"),
    "0-d": np.array(7.5),
    "0-d text": np.array("left"),
    "text": np.array(["left", "é", ""]),
    "bytes": np.array([b"ab", b"c\0d"]),
    "dates": np.array(["2026-01-02", "NaT"], "datetime64[ns]"),
    "durations": np.array([5, -7], "timedelta64[us]"),
    "void": np.array([b"abcd", b"efgh"], "V4"),
    "structured": np.array([(1.5, 7, "ab", (1, 2)), (np.nan, -7, "é", (3, 4))], STRUCTURED),
    "padded structured": np.zeros(3, PADDED),
    "Fortran": np.asfortranarray(np.arange(12).reshape(3, 4)),
    "transposed": np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
    "stepped": np.arange(20)[::3],
    "reversed": np.arange(5)[::-1],
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "empty": np.empty((0,), np.float32),
    "empty rows": np.empty((3, 0, 2), np.int16),
    "one": np.ones((1, 1, 1)),
    "many axes": np.arange(2**10).reshape((2,) * 10),
}


@pytest.mark.parametrize("array_format", ["npy", "pyd"])
@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS.keys())
def test_arrays_come_back_bit_for_bit(array: np.ndarray[Any, Any], array_format: Any) -> None:
    found = round_trip(array, array_format=array_format)
    if array_format == "pyd":  # numpy's own pickles may keep another byte order
        found = found.astype(array.dtype.newbyteorder("="))
    same(found, array)
    assert found.flags.writeable


@pytest.mark.parametrize("array_format", ["npy", "pyd"])
def test_equal_values_give_equal_bytes_whatever_their_padding(array_format: Any) -> None:
    found = set()
    for dirt in (1, 2, 3):
        memory = np.full(64, dirt, np.uint8)  # memory that was used before
        del memory
        array = np.zeros(8, PADDED)[::2]
        array["a"], array["b"] = 1, 2.5
        found.add(payload(array, array_format=array_format))
    assert len(found) == 1


@given(
    hnp.arrays(st.one_of(hnp.scalar_dtypes(), hnp.array_dtypes()), hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
)
def test_any_array_comes_back_and_numpy_itself_reads_it(array: np.ndarray[Any, Any]) -> None:
    if not array.dtype.itemsize:
        return
    same(round_trip(array), array)
    theirs = np.load(io.BytesIO(payload(array)), allow_pickle=False)
    assert (theirs.dtype, theirs.shape, theirs.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS.keys())
def test_the_payload_is_what_numpy_saves_for_an_array_in_c_order(array: np.ndarray[Any, Any]) -> None:
    saved = io.BytesIO()
    np.lib.format.write_array(
        saved, np.asarray(array, order="C"), version=(1, 0) if array.dtype != STRUCTURED else None
    )
    ours = payload(array)
    assert np.load(io.BytesIO(ours)).dtype == array.dtype
    if array.dtype.names is None:
        assert ours == saved.getvalue()


def test_a_pickled_array_has_protocol_4_which_python_3_8_reads() -> None:
    assert payload(np.arange(3), array_format="pyd")[:2] == b"\x80\x04"
    assert encode("x", np.arange(3)).extension == "npy"  # and is not the default


def test_field_names_beyond_latin_1_take_a_header_of_version_3_that_ends_at_a_multiple_of_64_bytes() -> None:
    array = np.array([(1, 2.5)], [("日本", "<i4"), ("b", "<f8")])
    stored = payload(array)
    assert stored[:8] == b"\x93NUMPY\x03\x00"
    assert len(stored) - array.nbytes == 128
    assert stored[127:128] == b"\n"
    assert np.load(io.BytesIO(stored)).tolist() == decode("npy", stored).tolist() == [(1, 2.5)]


def test_an_array_from_unaligned_memory_is_aligned() -> None:
    stored = payload(np.arange(5.0))
    memory = memoryview(bytearray(b"." + stored))[1:]
    found = decode("npy", memory)
    assert found.flags.aligned
    assert found.tolist() == [0, 1, 2, 3, 4]


def test_a_payload_has_dtype_and_shape() -> None:
    stored = encode("x", np.zeros((3, 4), ">f4"))
    assert (stored.extension, stored.dtype, stored.shape) == ("npy", np.dtype(">f4"), (3, 4))
    assert parse_npy_header(bytes(stored.buffers[0]), stored.size).data_offset == len(stored.buffers[0])


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (True, "bool"),
        (7, "int64"),
        (-(2**63), "int64"),
        (2.5, "float64"),
        (1j, "complex128"),
        (np.float32(2.5), "float32"),
    ],
)
def test_numbers_are_stored_as_arrays_without_axes(value: Any, dtype: str) -> None:
    found = round_trip(value)
    assert (found.dtype, found.shape, found[()]) == (np.dtype(dtype), (), value)


@pytest.mark.parametrize("array_format", ["npy", "pyd"])
def test_a_row_is_stored_without_its_base_array(array_format: Any) -> None:
    big = np.arange(100_000).reshape(1000, 100)
    for row in (big[3], torch.from_numpy(big)[3], big[:, 3][:100], torch.from_numpy(big)[:100, 3]):
        stored = payload(row, array_format=array_format)
        assert len(stored) < 100 * 8 + 400
        assert decode(array_format, stored).tolist() == row.tolist()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3),
        torch.arange(6).reshape(2, 3).T,
        torch.tensor(2.5),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.ones(3, requires_grad=True),
        torch.empty(0, 3),
        torch.ones(1).expand(4),
        torch.tensor([1.5], dtype=torch.float16),
    ],
    ids=str,
)
def test_tensors_are_stored_as_arrays(tensor: torch.Tensor) -> None:
    expected = tensor.detach().numpy()
    same(round_trip(tensor), expected)


NARROW = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("array_format", ["npy", "pyd"])
def test_a_narrow_tensor_is_refused_and_survives_as_it_is_told_to(dtype: torch.dtype, array_format: Any) -> None:
    tensor = torch.tensor([1.0, -0.5, 0.125]).to(dtype)
    with pytest.raises(OptionError, match=rf"'trace' must have a dtype that numpy supports, got {dtype}.*\.float\(\)"):
        encode("trace", tensor, array_format)
    found = torch.from_numpy(round_trip(tensor.float(), array_format=array_format)).to(dtype)
    assert found.float().tolist() == tensor.float().tolist() == [1.0, -0.5, 0.125]


def test_a_tensor_with_a_layout_unknown_to_numpy_is_refused() -> None:
    with pytest.raises(
        OptionError, match=r"'trace' must have a dtype that numpy supports.*to_dense\(\) first\. Convert"
    ):
        encode("trace", torch.eye(3).to_sparse())


def test_a_dtype_of_another_package_is_refused_since_files_give_back_void() -> None:
    rational = pytest.importorskip("numpy._core._rational_tests").rational  # as ml_dtypes makes its bfloat16
    for array in (np.array([rational(1, 2)]), np.zeros(2, [("a", rational)])):
        for array_format in ("npy", "pyd"):
            with pytest.raises(OptionError, match=r"'trace' must have a dtype of numpy itself, got .*rational"):
                encode("trace", array, array_format)


@pytest.mark.parametrize("array_format", ["npy", "pyd"])
def test_records_and_titles_come_back(array_format: Any) -> None:
    records = np.rec.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")])
    found = round_trip(records, array_format=array_format)
    assert (found.dtype, found.tolist()) == (np.dtype([("a", "i4"), ("b", "f8")]), [(1, 2.5), (3, 4.5)])
    titled = np.array([(7,)], {"names": ["a"], "formats": ["i4"], "titles": ["A"]})
    assert round_trip(titled, array_format=array_format).dtype == titled.dtype


@pytest.mark.parametrize(
    "value", [[np.datetime64(5, "ns")], {"a": np.timedelta64(5, "ns")}, (np.zeros(1, [("a", "i4")])[0],)], ids=str
)
def test_dates_and_records_inside_json_are_refused_instead_of_losing_unit_and_names(value: Any) -> None:
    with pytest.raises(OptionError, match=r"field 'trace'.* must be a string, number, list or dict, got"):
        encode("trace", value)


def test_changing_an_array_after_it_was_read_leaves_the_stored_bytes_alone() -> None:
    stored = payload(np.arange(3))
    decode("npy", stored)[:] = 9
    assert decode("npy", stored).tolist() == [0, 1, 2]


# -- everything else ---------------------------------------------------------------------------------------------------


@given(st.text(st.characters(codec="utf-8")))
def test_text_comes_back(text: str) -> None:
    assert encode("x", text).extension == "txt"
    assert round_trip(text) == text


@given(st.binary())
def test_bytes_come_back(data: bytes) -> None:
    assert round_trip(data) == round_trip(bytearray(data)) == round_trip(memoryview(data)) == data


def test_a_strided_view_of_bytes_comes_back() -> None:
    assert round_trip(memoryview(b"a-b-c-")[::2]) == b"abc"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda parts: st.lists(parts) | st.dictionaries(st.text(st.characters(codec="utf-8")), parts),
    max_leaves=20,
)


@given(st.lists(json_values) | st.dictionaries(st.text(st.characters(codec="utf-8")), json_values) | st.none())
def test_lists_and_dicts_come_back(value: Any) -> None:
    found = round_trip(value)
    assert found == value
    assert repr(found) == repr(value)  # 1, 1.0 and True are equal but not identical


def test_numpy_scalars_in_lists_become_plain_numbers() -> None:
    value = {"a": np.int16(3), "b": [np.float32(0.5), np.bool_(True)], "c": np.str_("é"), "d": (1, 2)}
    found = round_trip(value)
    assert found == {"a": 3, "b": [0.5, True], "c": "é", "d": [1, 2]}
    assert found["b"][1] is True


def test_mappings_and_named_tuples_become_dicts_and_lists() -> None:
    point = namedtuple("point", "x y")
    assert round_trip(OrderedDict(a=point(1, 2))) == {"a": [1, 2]}


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ([math.nan], r"field 'x'\[0\] must be finite in JSON, got nan"),
        ({"a": {"b": math.inf}}, r"field 'x'\['a'\]\['b'\] must be finite in JSON, got inf"),
        ([np.float32("-inf")], "got -inf"),
        ({1: 2}, "must be strings, got 1, which JSON would turn into a string"),
        ({None: 2}, "Keys of field .* must be strings, got None"),
        ([{("a", "b"): 1}], r"Keys of field 'x'\[0\] must be strings"),
        ([np.arange(3)], "got ndarray"),
        ([torch.ones(1)], "got Tensor"),
        ([b"bytes"], "got bytes"),
        ([{1, 2}], "got set"),
        ([1j], "got complex"),
        ([np.datetime64("2026-01-02")], "must be a string, number, list or dict, got date"),
        (["\ud800"], "cannot be stored as JSON"),
        ([10**5000], "cannot be stored as JSON"),
        ([object()], "got object"),
    ],
)
def test_values_that_json_would_change_are_refused_with_their_path(value: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        encode("x", value)


def test_endless_nesting_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(OptionError, match="cannot be stored as JSON"):
        json_bytes(deep, "x")
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(OptionError, match="cannot be stored as JSON"):
        json_bytes(endless, "x")
    while deep:  # taken apart here: Python frees nested lists by recursion
        deep = deep[0]


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (np.array([None]), "got Python objects"),
        (np.array([(1, [])], [("a", int), ("b", object)]), "got Python objects"),
        (np.ma.masked_array([1, 2], [True, False]), "masked array"),
        (2**63, "must fit into 64 bits"),
        (-(2**63) - 1, "must fit into 64 bits"),
        ({1, 2}, "'lfp' must be an array, .*, got set"),
        (range(3), "'lfp' must be an array, .*, got range"),
        (object(), "'lfp' must be an array, .*, got object"),
        (len, "'lfp' must be an array, .*, got builtin_function"),
        ("\ud800", "'lfp'"),
    ],
)
def test_unsupported_values_are_refused_with_the_field_name(value: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        encode("lfp", value)


def test_an_int_enum_is_stored_as_its_number() -> None:
    assert round_trip([Side.LEFT]) == [1]


def test_json_is_compact_and_stable() -> None:
    assert json_bytes({"b": 1, "a": ["é"]}, "x") == '{"b":1,"a":["é"]}'.encode()
    assert json.loads(json_bytes({"z": 1e300}, "x")) == {"z": 1e300}


def test_the_extension_is_the_last_part_in_any_case() -> None:
    assert decode("left.NPY", payload(np.arange(2))).tolist() == [0, 1]
    assert decode("x.cls", b"17") == 17
    assert decode("mp4", b"RIFF") == b"RIFF"
    assert decode("wav", b"RIFF", decoding="basic") == b"RIFF"
    assert decode("npy.unknown", b"abc") == b"abc"


def test_arrays_in_zips_and_images_take_more_memory_than_their_payloads() -> None:
    kinds = ("npy", "x.npy", "json", "txt", "bin", "pyd", "npz", "x.NPZ", "jpg", "left.png", "tiff")
    assert [kind for kind in kinds if not is_uncompressed(kind)] == ["npz", "x.NPZ", "jpg", "left.png", "tiff"]
