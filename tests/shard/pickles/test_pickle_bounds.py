"""Pickles that are small and ask for much: refused before the time or the memory is taken."""

import collections
import pickle
import resource
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import run_isolated

from penstock.shard.pickles import unpickler
from penstock.shard.pickles.unpickle import unpickle
from penstock.shard.pickles.unpickler import PickleRefused

PRIME = (1 << 61) - 1  # hashes of integers are remainders by it


def cost(payload: bytes) -> tuple[str, int]:
    """Return what came of a pickle, and by how many megabytes the process has grown at most."""
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))  # so that the machine survives in any case
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        unpickle(payload)
        outcome = "read"
    except PickleRefused as error:
        outcome = str(error)
    except BaseException as error:
        outcome = f"not refused: {type(error).__name__}"
    return outcome, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10


def integer(number: int) -> bytes:
    content = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(content)]) + content


def real(number: float) -> bytes:
    return b"G" + struct.pack(">d", number)


def call(module: str, name: str, arguments: bytes) -> bytes:
    return f"c{module}\n{name}\n".encode() + arguments + b"R"


def pairs_of_pairs(levels: int) -> bytes:
    return b")" + b"2\x86" * levels  # (), ((), ()), …: DUP and TUPLE2


PAIRS = pairs_of_pairs(40)
TEXT = b"X" + struct.pack("<I", 1 << 16) + b"x" * (1 << 16) + b"q\x00"  # a text in the memo
BYTES = b"B" + struct.pack("<I", 1 << 16) + b"x" * (1 << 16) + b"q\x00"
U1 = call("numpy", "dtype", b"(X\x02\0\0\0u1I00\nI01\nt")
COLLIDING = [integer(PRIME * (number + (1 << 20))) for number in range(20_000)]


def nested_dtypes(levels: int) -> bytes:
    """Return a dtype of two fields of the same dtype of two fields …"""
    names = b"X\x01\0\0\0aX\x01\0\0\0b\x86"
    inner = b"q\x01"
    out = U1 + inner
    for _ in range(levels):
        head = call("numpy", "dtype", b"(X\x02\0\0\0V2I00\nI01\nt")
        fields = b"}(X\x01\0\0\0ah\x01K\x00\x86X\x01\0\0\0bh\x01K\x01\x86u"
        out += b"0" + head + b"(I3\nX\x01\0\0\0|N" + names + fields + b"K\x02K\x01K\x10tb" + inner
    return out


def dtype_array(dtype: bytes) -> bytes:
    return b"\x80\x02]" + dtype + b"0h\x01a."


STEPS: dict[str, bytes] = {
    "the key of a dictionary": b"\x80\x02}" + PAIRS + b"Ns.",
    "keys of a dictionary": b"\x80\x02}(" + PAIRS + b"Nu.",
    "the key of DICT": b"\x80\x02(" + PAIRS + b"Nd.",
    "an element of a set": b"\x80\x04\x8f(" + PAIRS + b"\x90.",
    "an element of a frozenset": b"\x80\x04(" + PAIRS + b"\x91.",
    "an element of set()": b"\x80\x02" + call("builtins", "set", b"](" + PAIRS + b"e\x85") + b".",
    "an element of frozenset()": b"\x80\x02" + call("builtins", "frozenset", b"](" + PAIRS + b"e\x85") + b".",
    "the key of OrderedDict()": b"\x80\x02" + call("collections", "OrderedDict", b"](" + PAIRS + b"N\x86e\x85") + b".",
    "a key that ends in a list": b"\x80\x02}" + PAIRS + b"]\x86Ns.",
    "what is returned": b"\x80\x02" + PAIRS + b".",
    "lists that are returned": b"\x80\x02]" + b"q\x000](h\x00h\x00e" * 40 + b".",
    "lists that grow after they were used": b"\x80\x02"
    + b"".join(b"]q" + bytes([n]) for n in range(41))
    + b"".join(b"h" + bytes([n + 1]) + b"(h" + bytes([n]) + b"h" + bytes([n]) + b"e0" for n in reversed(range(40)))
    + b"h\x28.",
    "integers of the same hash": b"\x80\x02}(" + b"N".join(COLLIDING) + b"Nu.",
    "integers of the same hash, one at a time": b"\x80\x02}" + b"".join(one + b"Ns" for one in COLLIDING) + b".",
    "complex numbers of the same hash": b"\x80\x04\x8f("
    + b"".join(call("builtins", "complex", real(-1000003 * n) + real(n) + b"\x86") for n in range(1, 20_000))
    + b"\x90.",
    "a persistent id": b"\x80\x02" + PAIRS + b"Q.",
    "a shape": b"\x80\x02"
    + call("numpy.core.multiarray", "_reconstruct", b"cnumpy\nndarray\n" + PAIRS + b"K\x00\x87")
    + b".",
    "the unit of dates": b"\x80\x02"
    + call("numpy", "dtype", b"(X\x02\0\0\0M8I00\nI01\nt")
    + b"(I3\nX\x01\0\0\0<NNNK\x08K\x08K\x00N"
    + PAIRS
    + b"K\x01\x86\x86tb.",
    "dtypes in dtypes": dtype_array(nested_dtypes(40)),
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_pickle_cannot_ask_for_endless_steps(kind: str) -> None:
    outcome, megabytes = run_isolated(cost, STEPS[kind])
    assert outcome != "read"
    assert not outcome.startswith("not refused")
    assert len(outcome) < 500
    assert megabytes < 200


def test_the_small_pickle_takes_python_itself_too_many_steps() -> None:
    # 2^18 of them, so that this ends; 40 levels are 2^40.
    assert len(STEPS["the key of a dictionary"]) < 100
    payload = b"\x80\x02}" + pairs_of_pairs(18) + b"Ns."
    (found,) = pickle.loads(payload)
    height = 0
    while found:
        found, height = found[0], height + 1
    assert height == 18
    with pytest.raises(PickleRefused, match="a key of type tuple; keys must be text, numbers or bytes"):
        unpickle(payload)


COPIES: dict[str, bytes] = {
    "encode": TEXT + b"0](" + call("_codecs", "encode", b"h\x00\x85") * 10_000 + b"e.",
    "bytearray": BYTES + b"0](" + call("builtins", "bytearray", b"h\x00\x85") * 10_000 + b"e.",
    "arrays": BYTES
    + U1
    + b"q\x020"
    + b"0]("
    + (
        call("numpy.core.multiarray", "_reconstruct", b"cnumpy\nndarray\nK\x00\x85C\x01b\x87")
        + b"(K\x01J\0\0\1\0\x85h\x02I00\nh\x00tb"
    )
    * 1_000
    + b"e.",
    "one array many times": BYTES
    + U1
    + b"q\x020"
    + call("numpy.core.numeric", "_frombuffer", b"(h\x00h\x02J\0\0\1\0\x85C\x01Ct")
    + b"q\x03"
    + b"0]("
    + b"h\x03" * 10_000
    + b"e.",
    "sets": b"\x80\x04](" + b"\x8f" * 300_000 + b"e.",
    "arguments": b"(C\x01b" + b"N" * 100_000 + b"tq\x000](" + b"cbuiltins\nbytes\nh\x00R" * 10_000 + b"e.",
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_pickle_cannot_copy_without_end(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MAX_ITEM_BYTES", str(1 << 24))
    outcome, megabytes = run_isolated(cost, b"\x80\x04" + COPIES[kind].removeprefix(b"\x80\x04"))
    assert "PENSTOCK_MAX_ITEM_BYTES" in outcome
    assert megabytes < 150  # 16 MiB or 100 times what is stored, and what reading takes besides


def test_the_message_names_the_limit_and_the_limit_can_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = b"x" * 4_000_000
    payload = pickle.dumps([shared] * 200)
    assert unpickle(pickle.dumps([shared] * 60))[59] is not None
    monkeypatch.setenv("PENSTOCK_MAX_ITEM_BYTES", "1000")
    with pytest.raises(PickleRefused, match=r"it would take 800,\d+ bytes|it would take 800,\d+,\d+ bytes of memory"):
        unpickle(payload)
    monkeypatch.setenv("PENSTOCK_MAX_ITEM_BYTES", "900000000")
    assert len(unpickle(payload)) == 200


def depths() -> dict[str, Callable[[int], bytes]]:
    return {
        "tuples": lambda n: b"\x80\x02)" + b"\x85" * n + b".",
        "lists": lambda n: b"\x80\x02]" * 1 + b"]" * (n - 1) + b"a" * (n - 1) + b".",
        "dictionaries": lambda n: b"\x80\x02" + b"}N" * (n - 1) + b"}" + b"s" * (n - 1) + b".",
    }


@pytest.mark.parametrize("kind", depths())
@pytest.mark.parametrize("depth", [200, 200_000])
def test_a_pickle_of_deep_nesting_is_refused(kind: str, depth: int) -> None:
    outcome, _ = run_isolated(cost, depths()[kind](depth))
    assert "nested more than 100 deep" in outcome


@pytest.mark.parametrize("kind", depths())
def test_nesting_within_the_limit_is_read(kind: str) -> None:
    payload = depths()[kind](90)
    assert unpickle(payload) == pickle.loads(payload)


@pytest.mark.parametrize(
    "payload",
    [b"\x80\x02]q\x00h\x00a.", b"\x80\x02}q\x00Nh\x00s.", b"\x80\x02]q\x00h\x00\x85a."],
    ids=["list", "dictionary", "through a tuple"],
)
def test_a_container_that_contains_itself_is_refused(payload: bytes) -> None:
    assert pickle.loads(payload)
    with pytest.raises(PickleRefused, match="contains itself"):
        unpickle(payload)


def test_a_large_integer_is_refused() -> None:
    with pytest.raises(PickleRefused, match="an integer of 100001 bytes"):
        unpickle(pickle.dumps(1 << 800_000))
    with pytest.raises(PickleRefused, match="an integer of"):
        unpickle(b"I0x" + b"f" * 10_000 + b"\n.")


@pytest.mark.parametrize(
    "payload",
    [
        b"\x80\x02" + call("torch", "Size", b")\x85") + b"Na.",
        pickle.dumps(torch.ones(3), protocol=2)[:-1] + b"K\x00K\x01s.",
        pickle.dumps(torch.ones(3), protocol=2)[:-1] + b"(K\x01\x90.",
        pickle.dumps(torch.ones(3), protocol=2)[:-1] + b"(NNNNtb.",
        pickle.dumps(bytearray(b"abc"), protocol=5)[:-1] + b"K\x01a.",
        b"\x80\x02K\x01)R.",
    ],
    ids=["append", "set an element", "add", "set a state", "append bytes", "call a number"],
)
def test_only_containers_are_modified_and_only_functions_called(payload: bytes) -> None:
    with pytest.raises(PickleRefused, match=r"it modifies|it calls"):
        unpickle(payload)


@pytest.mark.parametrize("count", [0, -1, 1 << 31])
def test_dates_in_steps_that_are_none_are_refused(count: int) -> None:
    payload = pickle.dumps(np.array(["2026-01-02"], "M8[D]"), protocol=2)
    with pytest.raises(PickleRefused, match="dates in an unknown unit"):
        unpickle(payload.replace(b"K\x01K\x01K\x01t", integer(count) + b"K\x01K\x01t"))
    assert unpickle(payload).tolist() == np.array(["2026-01-02"], "M8[D]").tolist()


@pytest.mark.parametrize(
    "value",
    [
        {2**70 + i for i in range(3000)},
        {np.int64(i): i for i in range(2000)},
        {1 + 2j, 2 + 1j},
        collections.OrderedDict([("b", 1), ("a", (1, (2, 3)))]),
        {float(i) for i in range(1000)} | {None, True, "x", b"y"},
        torch.nn.Linear(2, 3).state_dict(),
    ],
    ids=["large", "scalars", "complex", "ordered", "mixed", "state"],
)
def test_ordinary_keys_and_containers_are_read(value: Any) -> None:
    payload = pickle.dumps(value)
    found, theirs = unpickle(payload), pickle.loads(payload)
    assert type(found) is type(theirs)
    if isinstance(found, dict):
        assert list(found) == list(theirs)
        assert [str(one) for one in found.values()] == [str(one) for one in theirs.values()]
        assert getattr(found, "_metadata", None) == getattr(theirs, "_metadata", None)
    else:
        assert found == theirs


class WithItems(collections.OrderedDict):  # type: ignore[type-arg]  # of any types
    """Pickles as an OrderedDict whose method `items` is hidden by a number."""

    def __reduce__(self) -> Any:
        return collections.OrderedDict, (), {"items": 1}


WIDE = np.zeros(1, [(f"f{field}", "i1") for field in range(9000)])[0]
REFUSED: dict[str, tuple[bytes, str]] = {
    "a tuple as a key": (pickle.dumps({(1, 2): 3}), "a key of type tuple; keys must be text, numbers or bytes"),
    "a tuple in a set": (pickle.dumps({("a", 1)}), "a key of type tuple"),
    "a frozenset in a set": (pickle.dumps({frozenset({1})}), "a key of type frozenset"),
    "a structured scalar": (pickle.dumps(WIDE), "a structured scalar; store it as an array"),
    "structured scalars as keys": (
        pickle.dumps(WIDE, 4)[:-1] + b"r\xa0\x86\1\0" + b"0]" + b"\x8f(j\xa0\x86\1\0\x900" * 20_000 + b".",
        "a structured scalar",
    ),
    "counts": (pickle.dumps(collections.Counter("abracadabra")), "it uses collections.Counter"),
    "a state that hides a method": (pickle.dumps(WithItems()), "it modifies an object that is not data"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_hashed_in_many_steps_or_hides_methods_is_refused_at_once(kind: str) -> None:
    payload, message = REFUSED[kind]
    with pytest.raises(PickleRefused, match=message):
        unpickle(payload)


def test_the_size_and_the_opcodes_of_a_pickle_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    values = pickle.dumps([float(number) for number in range(1000)])
    monkeypatch.setattr(unpickler, "_MAX_OPCODES", 1100)
    assert len(unpickle(values)) == 1000
    monkeypatch.setattr(unpickler, "_MAX_OPCODES", 900)
    with pytest.raises(PickleRefused, match="a pickle of more than 900 opcodes; store numbers as an array"):
        unpickle(values)
    monkeypatch.setattr(unpickler, "_MAX_BYTES", 1000)
    with pytest.raises(PickleRefused, match=r"a pickle of 9,\d\d\d bytes; at most 1,000 are allowed"):
        unpickle(values)
