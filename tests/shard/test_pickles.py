"""Pickles of data are read; nothing else of a pickle is ever run, imported or allocated."""

import collections
import io
import os
import pickle
import resource
import struct
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import run_isolated

from penstock.shard.pickles import tensors as pickles
from penstock.shard.pickles.unpickle import unpickle
from penstock.shard.pickles.unpickler import PickleRefused

PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(20)[::3],
        np.array(2.5),
        np.array(["left", "é"]),
        np.array(["2026-01-02"], "M8[D]"),
        np.array([(1, 2.5)], [("a", "i4"), ("b", ">f8")]),
        np.empty((0, 3), np.float32),
        np.array([True]),
        np.arange(4, dtype=">i4"),
    ],
    ids=lambda array: f"{array.dtype}",
)
def test_arrays_are_read(array: np.ndarray[Any, Any], protocol: int) -> None:
    stored = pickle.dumps(array, protocol=protocol)
    found, theirs = unpickle(stored), pickle.loads(stored)
    assert (found.dtype, found.shape, found.tolist()) == (theirs.dtype, array.shape, array.tolist())


def test_fields_with_titles_are_read_by_their_names() -> None:
    array = np.array([(1, 2.5)], [(("first field", "a"), "<i4"), ("b", "<f8")])
    found = unpickle(pickle.dumps(array))
    assert (found.dtype.names, found.tolist()) == (("a", "b"), [(1, 2.5)])


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True], "b": ("é", b"\xff", 2**100)},
        {1, 2},
        frozenset({3}),
        1j,
        bytearray(b"abc"),
        collections.OrderedDict(a=1),
        np.float32(2.5),
        np.int64(7),
        np.dtype("<f4"),
    ],
    ids=str,
)
def test_plain_values_are_read(value: Any, protocol: int) -> None:
    found = unpickle(pickle.dumps(value, protocol=protocol))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "tensor", [torch.arange(6).reshape(2, 3), torch.ones(3)[1:], torch.tensor(2.5), torch.ones(2, 3).T]
)
def test_tensors_are_read(tensor: torch.Tensor, protocol: int) -> None:
    found = unpickle(pickle.dumps({"x": tensor}, protocol=protocol))["x"]
    assert (found.dtype, found.tolist()) == (tensor.dtype, tensor.tolist())


# -- what would run something ------------------------------------------------------------------------------------------


class Calls:
    """Pickles as a call of anything."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def hostile(trace: Path) -> dict[str, bytes]:
    """Return pickles, each of which would create `trace` if it were run."""
    command = f"touch {trace}"
    text = f"open({str(trace)!r}, 'w').close()"
    known = {
        "system": pickle.dumps(Calls(os.system, command)),
        "eval": pickle.dumps(Calls(eval, text)),
        "exec": pickle.dumps(Calls(exec, text)),
        "open": pickle.dumps(Calls(open, str(trace), "w")),
        "getattr": b"cbuiltins\ngetattr\n(cos\nsystem\nX\x08\0\0\0__call__tR.",
        "in a list": pickle.dumps([1, Calls(os.system, command)]),
        "as a key": pickle.dumps({Calls(os.system, command): 1}),
        "in an array": pickle.dumps(np.array([Calls(os.system, command)], object)),
        "in a tensor's place": pickle.dumps({"x": torch.ones(1), "y": Calls(os.system, command)}),
    }
    name = f"X{struct.pack('<I', len(command)).decode('latin1')}{command}".encode("latin1")
    known["protocol 0"] = b"cos\nsystem\n(S'" + command.encode() + b"'\ntR."
    known["INST"] = b"(S'" + command.encode() + b"'\nios\nsystem\n."
    known["OBJ"] = b"(cos\nsystem\n" + name + b"o."
    known["STACK_GLOBAL"] = b"\x80\x04\x8c\x02os\x8c\x06system\x93" + name + b"\x85R."
    known["dotted name"] = b"\x80\x04\x8c\x05numpy\x8c\x15testing.runstring.exec\x93."
    known["numpy's own exec"] = (
        b"cnumpy.testing._private.utils\nrunstring\n(" + f"X{chr(len(text))}\0\0\0{text}".encode() + b"}tR."
    )
    known["through numpy"] = b"cnumpy\nos.system\n" + name + b"\x85R."
    known["torch.load"] = pickle.dumps(Calls(torch.load, str(trace)))
    return known


@pytest.mark.parametrize("kind", sorted(hostile(Path("trace"))))
def test_a_malicious_pickle_is_refused_and_nothing_of_it_runs(kind: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with pytest.raises(PickleRefused):
        unpickle(hostile(trace)[kind])
    assert not trace.exists()


def test_the_malicious_pickles_work_with_pythons_unpickler(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for kind in ("system", "eval", "in an array", "protocol 0", "INST", "STACK_GLOBAL"):
        pickle.loads(hostile(trace)[kind])
        assert trace.exists(), kind
        trace.unlink()


def test_a_malicious_pickle_inside_a_tensor_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    inner = pickle.dumps(Calls(os.system, f"touch {trace}"))
    load_from_bytes = torch.storage._load_from_bytes
    with pytest.raises(PickleRefused):
        unpickle(pickle.dumps(Calls(load_from_bytes, inner)))
    out = io.BytesIO()
    torch.save({"x": Calls(os.system, f"touch {trace}")}, out)
    with pytest.raises(PickleRefused):
        unpickle(pickle.dumps(Calls(load_from_bytes, out.getvalue())))
    assert not trace.exists()


@pytest.mark.parametrize(
    "name",
    [
        "os system",
        "builtins eval",
        "builtins getattr",
        "builtins __import__",
        "builtins print",
        "numpy load",
        "numpy fromfile",
        "numpy memmap",
        "numpy core.multiarray.scalar",
        "torch load",
        "torch.serialization load",
        "functools partial",
        "operator attrgetter",
        "subprocess Popen",
        "codecs encode",
        "collections namedtuple",
        "penstock.shard.pickles io",
    ],
)
def test_a_name_that_is_not_allowed_is_refused_by_name(name: str) -> None:
    module, _, attribute = name.partition(" ")
    with pytest.raises(PickleRefused, match=rf"it uses {module}\.{attribute}"):
        unpickle(f"c{module}\n{attribute}\n.".encode())


def test_a_refused_module_is_not_even_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "penstock_never_imported.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w').close()")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PickleRefused, match="penstock_never_imported"):
        unpickle(b"cpenstock_never_imported\nanything\n.")
    assert not (tmp_path / "trace").exists()


def test_a_reference_to_something_outside_is_refused() -> None:
    with pytest.raises(PickleRefused, match="outside the pickle"):
        unpickle(b"Pfile:///etc/passwd\n.")
    with pytest.raises(PickleRefused, match="outside the pickle"):
        unpickle(b"\x80\x04\x8c\x01aQ.")


@pytest.mark.parametrize(
    "name", ["numpy ndarray", "_codecs encode", "numpy.core.multiarray scalar", "builtins bytearray"]
)
def test_a_pickle_cannot_change_the_unpickler_itself(name: str) -> None:
    module, _, attribute = name.partition(" ")
    function = pickles.ALL_NAMES[module, attribute]
    before = (getattr(function, "__defaults__", None), dict(getattr(function, "__dict__", {})))
    # BUILD sets attributes of whatever lies on the stack: first those of the pair's dict, by setattr.
    state = pickle.dumps((None, {"__defaults__": (b"changed",), "planted": 1}), protocol=2)[2:-1]
    with suppress(PickleRefused):
        unpickle(b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + state + b"b.")
    after = (getattr(function, "__defaults__", None), dict(getattr(function, "__dict__", {})))
    if after != before:  # restore it for the following tests
        function.__defaults__ = before[0]
        function.__dict__.clear()
    assert after == before


# -- what would take memory or time ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        np.array([None, {}], object),
        {"a": [np.array([1, "x"], object)]},
        (np.array([(1, None)], [("a", int), ("b", object)]),),
        collections.OrderedDict(a=np.array([None], object)),
        {1: np.array([[]], object)},
        np.array([None], object)[0:1],
    ],
    ids=["plain", "nested", "structured", "ordered", "value", "view"],
)
def test_arrays_of_objects_are_refused_wherever_they_are(value: Any) -> None:
    with pytest.raises(PickleRefused, match="Python objects"):
        unpickle(pickle.dumps(value))


def grown(payload: bytes) -> tuple[str, int]:
    """Return what came of a pickle, and by how many megabytes the process has grown at most."""
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))  # so that the machine survives in any case
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        unpickle(payload)
        outcome = "read"
    except PickleRefused:
        outcome = "refused"
    except BaseException as error:
        outcome = repr(error)[:200]
    return outcome, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10


LARGE = 1 << 33
DTYPE = b"cnumpy\ndtype\n(X\x02\0\0\0f8I00\nI01\ntR"
GREEDY = {
    "an array by its shape": b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I%d\ntS'b'\ntR." % LARGE,
    "an array of a shape without its data": b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"
    b"(I1\n(I%d\nt" % LARGE + DTYPE + b"I00\nS'x'\ntb.",
    "an empty array": b"cnumpy\nndarray\n(I%d\nt\x85R." % LARGE,
    "a bytearray by its size": b"cbuiltins\nbytearray\n(I%d\ntR." % LARGE,
    "a bytearray by its opcode": b"\x80\x05\x96" + struct.pack("<Q", LARGE) + b"x.",
    "bytes by their opcode": b"\x80\x04\x8e" + struct.pack("<Q", LARGE) + b"x.",
    "text by its opcode": b"\x80\x04\x8d" + struct.pack("<Q", LARGE) + b"x.",
    "a frame": b"\x80\x04\x95" + struct.pack("<Q", LARGE) + b"N.",
    "the memo": b"\x80\x02Nr" + struct.pack("<I", 1 << 26) + b".",
    "a scalar of a large type": b"cnumpy.core.multiarray\nscalar\n("
    b"cnumpy\ndtype\n(X\x0b\0\0\0V1000000000I00\nI01\ntRS'x'\ntR.",
}


@pytest.mark.parametrize("kind", GREEDY)
def test_a_pickle_cannot_allocate_more_than_its_size(kind: str) -> None:
    outcome, megabytes = run_isolated(grown, GREEDY[kind])
    assert outcome == ("refused" if kind != "the memo" else "read")
    assert megabytes < 100


def dtype_of(state: tuple[Any, ...], kind: str = "V1") -> bytes:
    """Return a pickle of an array of one item, whose dtype says what `state` says."""

    class Dtype:
        def __reduce__(self) -> Any:
            return np.dtype, (kind, False, True), state

    reconstruct = np._core.multiarray._reconstruct
    head = pickle.dumps(Calls(reconstruct, np.ndarray, (0,), b"b"), protocol=2)[2:-1]
    size = np.dtype(kind).itemsize
    return b"\x80\x02" + head + pickle.dumps((1, (1,), Dtype(), False, b"x" * size), protocol=2)[2:-1] + b"b."


def test_the_crafted_array_is_valid() -> None:
    fields = {"a": (np.dtype("u1"), 0)}
    found = unpickle(dtype_of((3, "|", None, ("a",), fields, 1, 1, 0)))
    assert found["a"].tolist() == [ord("x")]


def read_past_the_end() -> str:
    fields = {"a": (np.dtype("u1"), 1 << 30)}
    try:
        found = unpickle(dtype_of((3, "|", None, ("a",), fields, 1, 1, 0)))
    except PickleRefused:
        return "refused"
    return f"read {found['a'].tolist()}"


def test_a_field_that_lies_outside_its_item_is_refused() -> None:
    assert run_isolated(read_past_the_end) == "refused"


def numbers_as_objects() -> str:
    """Flags of a dtype say that its items are references: numpy would follow them."""
    try:
        found = unpickle(dtype_of((3, "<", None, None, None, -1, -1, 63), kind="i8"))
    except PickleRefused:
        return "refused"
    return f"read {found.tolist()}, flags {found.dtype.flags}"


def test_numbers_that_pretend_to_be_references_are_refused_or_read_as_numbers() -> None:
    assert run_isolated(numbers_as_objects) in ("refused", f"read {[int.from_bytes(b'x' * 8, 'little')]}, flags 0")


def test_a_tensor_cannot_claim_more_than_its_storage_has() -> None:
    storage = torch.ones(2).untyped_storage()
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
    claims = Calls(torch._utils._rebuild_tensor_v2, typed, 0, (1 << 40,), (1,), False, collections.OrderedDict())
    with pytest.raises(PickleRefused):
        unpickle(pickle.dumps(claims))


def doubled(depth: int) -> bytes:
    """Return a small pickle of lists, each of which holds the one before it twice."""
    value: list[Any] = [1]
    for _ in range(depth):
        value = [value, value]
    return pickle.dumps(value)


def test_a_pickle_of_lists_in_lists_does_not_take_forever() -> None:
    payload = doubled(60)
    assert len(payload) < 1000
    outcome, _ = run_isolated(grown, payload)
    assert outcome in ("read", "refused")


def test_a_list_that_holds_itself_is_read_or_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    outcome, _ = run_isolated(grown, pickle.dumps(endless))
    assert outcome in ("read", "refused")


@pytest.mark.parametrize("length", [0, 1, 5, 20, 40, -1])
def test_a_truncated_pickle_is_refused(length: int) -> None:
    whole = pickle.dumps(np.arange(10))
    with pytest.raises(PickleRefused, match="not a valid pickle"):
        unpickle(whole[:length])


def test_every_damaged_pickle_is_read_or_refused() -> None:
    assert run_isolated(damaged_pickles) == "all read or refused"


def damaged_pickles() -> str:
    whole = pickle.dumps({"a": np.arange(4), "b": [1, "x"]}, protocol=4)
    warnings.simplefilter("error")
    ignored: list[Any] = []
    sys.unraisablehook = ignored.append
    for place in range(len(whole)):
        for bit in (0, 3, 7):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            with suppress(PickleRefused):
                unpickle(bytes(damaged))
    return f"ignored: {[str(one.exc_value) for one in ignored]}" if ignored else "all read or refused"
