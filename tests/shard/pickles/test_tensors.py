"""Files of `torch.save`: what they hold is what torch reads, and no size in them is trusted."""

import collections
import io
import pickle
import re
import resource
import struct
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import run_isolated

from penstock.shard.decoders.decode import decode

VALUES = {
    "view": torch.arange(6).reshape(2, 3).T[1:],
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.arange(4).to(torch.bfloat16),
    "uint16": torch.tensor([0, 7, 65535], dtype=torch.uint16),
    "complex": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "parameter": torch.nn.Parameter(torch.arange(3.0)),
    "expanded": torch.arange(3).expand(2, 3),
    "float8": torch.arange(4.0).to(torch.float8_e4m3fn).view(torch.uint8),
}


def saved(value: Any, *, as_zip: bool = True) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, _use_new_zipfile_serialization=as_zip)
    return out.getvalue()


@pytest.mark.parametrize("as_zip", [True, False])
@pytest.mark.parametrize("kind", VALUES)
def test_tensors_are_what_torch_reads(kind: str, as_zip: bool) -> None:
    payload = saved(VALUES[kind], as_zip=as_zip)
    # torch itself writes a stream of uint16, and cannot read it.
    theirs = VALUES[kind] if kind == "uint16" else torch.load(io.BytesIO(payload), weights_only=True)
    found = decode("pt", payload)
    assert type(found) is type(theirs)
    assert (found.dtype, found.shape, found.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    assert (found.requires_grad, found.is_conj(), found.is_neg()) == (
        theirs.requires_grad,
        theirs.is_conj(),
        theirs.is_neg(),
    )
    assert torch.equal(found, theirs)


@pytest.mark.parametrize("as_zip", [True, False])
def test_tensors_share_memory_as_they_did(as_zip: bool) -> None:
    whole = torch.arange(10)
    found = decode("pth", saved({"whole": whole, "part": whole[3:5], "again": whole}, as_zip=as_zip))
    found["whole"][3] = 70
    assert (found["part"].tolist(), found["again"] is found["whole"]) == ([70, 4], True)


@pytest.mark.parametrize("as_zip", [True, False])
def test_containers_sizes_and_arrays_are_read(as_zip: bool) -> None:
    value = {
        "model": torch.nn.Linear(2, 1).state_dict(),
        "about": [torch.Size([2, 3]), torch.float32, torch.device("cpu"), None, 2.5, "text"],
        "array": np.arange(3),
        "order": collections.OrderedDict(b=1, a=2),
    }
    found = decode("pt", saved(value, as_zip=as_zip))
    assert found["about"] == value["about"]
    assert (found["array"].tolist(), found["order"]) == ([0, 1, 2], value["order"])
    assert found["model"].keys() == value["model"].keys()
    assert all(torch.equal(found["model"][name], value["model"][name]) for name in value["model"])
    assert found["model"]._metadata == value["model"]._metadata


def test_another_byte_order_is_swapped() -> None:
    value = {"x": torch.arange(3), "z": torch.tensor([1 + 2j])}
    found = decode("pt", rewrite(saved(value), {"byteorder": lambda _: b"big"}))
    assert found["x"].tolist() == [0, 1 << 56, 2 << 56]
    assert found["z"].numpy().byteswap().tolist() == [1 + 2j]


def rewrite(payload: bytes, changes: Any, method: int = zipfile.ZIP_STORED) -> bytes:
    """Return the archive with some of its records changed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(payload)) as given, zipfile.ZipFile(out, "w", method) as archive:
        for name in given.namelist():
            content = given.read(name)
            archive.writestr(name, changes.get(name.partition("/")[2], lambda same: same)(content))
    return out.getvalue()


def test_a_deflated_file_is_read_and_a_damaged_one_is_refused() -> None:
    value = torch.arange(1000)
    deflated = rewrite(saved(value), {}, zipfile.ZIP_DEFLATED)
    assert len(deflated) < len(saved(value)) / 2
    assert torch.equal(decode("pt", deflated), value)
    damaged = bytearray(saved(value))
    damaged[damaged.index(struct.pack("<3q", 7, 8, 9))] ^= 1
    with pytest.raises(ValueError, match="the checksum of the member 'archive/data/0' does not match"):
        decode("pt", bytes(damaged))


# -- hostile -----------------------------------------------------------------------------------------------------------


def swap_number(payload: bytes, old: int, new: int) -> bytes:
    """Return the file with a number of its pickle replaced by a larger one."""
    code = b"M" + struct.pack("<H", old)
    replacement = b"\x8a\x06" + struct.pack("<Q", new)[:6]
    return rewrite(payload, {"data.pkl": lambda pickled: pickled.replace(code, replacement)})


def cost(payload: bytes) -> tuple[str, int]:
    """Return what came of it, and by how many megabytes the process has grown at most."""
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        decode("pt", payload)
        outcome = "read"
    except ValueError as error:
        outcome = str(error)
    return outcome, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10


def many_entries(payload: bytes, times: int) -> bytes:
    """Return an archive whose directory names its largest record many times: overlapping entries."""
    with zipfile.ZipFile(io.BytesIO(payload)) as archive:
        start = archive.start_dir
    end = payload.index(b"PK\5\6")
    directory = payload[start:end]
    n_entries = len(directory.split(b"PK\1\2")) - 1
    tail = struct.pack(
        "<4s4H2LH", b"PK\5\6", 0, 0, n_entries * times, n_entries * times, len(directory) * times, start, 0
    )
    return payload[:start] + directory * times + tail


ZEROS = rewrite(saved(torch.zeros(1 << 22)), {}, zipfile.ZIP_DEFLATED)  # 16 MiB in 17 kB
THOUSAND = saved(torch.arange(1000))
FORGED = {
    "zeros that are deflated": (ZEROS, "16,\\d+,\\d+ bytes of memory, but may take at most 8,388,608"),
    "a record many times": (many_entries(rewrite(saved(torch.zeros(1 << 19)), {}, zipfile.ZIP_DEFLATED), 9), "memory"),
    "more items than are stored": (swap_number(THOUSAND, 1000, 1 << 40), "bytes, of which 8000 are stored|needs"),
    "a method that inflates at once": (rewrite(THOUSAND, {}, zipfile.ZIP_BZIP2), "must be stored or deflated"),
    "no pickle": (rewrite(THOUSAND, {"data.pkl": lambda _: b""}), "not a valid pickle"),
    "a tensor without its data": (THOUSAND.replace(b"data/0", b"data/1"), "no member 'archive/data/0'"),
    "no tensors at all": (pickle.dumps([1, 2]), "it is not a file of torch.save|not a valid"),
    "a stream without storages": (
        saved(torch.arange(1000), as_zip=False).replace(b"\x80\x02]q\x00X", b"\x80\x02]q\x000X", 1),
        "are missing|another length|no valid|it modifies|not a valid",
    ),
    "a stream that ends early": (saved(torch.arange(1000), as_zip=False)[:-1], "are missing"),
    "a stream of many items": (
        saved(torch.arange(1000), as_zip=False).replace(b"M\xe8\x03", b"\x8a\x06" + bytes([0, 0, 0, 0, 0, 1])),
        "bytes, of which at most",
    ),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_file_is_refused_and_takes_no_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MAX_ITEM_BYTES", str(8 << 20))
    payload, reason = FORGED[kind]
    outcome, megabytes = run_isolated(cost, payload)
    assert re.search(reason, outcome), outcome
    assert megabytes < 60


def test_a_view_that_repeats_an_item_counts_as_large_as_it_is() -> None:
    payload = saved({"x": torch.zeros(1).expand(1 << 28)})  # 1 GiB for whoever copies it
    with pytest.raises(ValueError, match=r"it would take 1,073,\d+,\d+ bytes of memory"):
        decode("pt", payload)


def test_a_storage_inside_a_storage_is_refused() -> None:
    inner = pickle.dumps(torch.ones(2))

    class Storage:
        def __reduce__(self) -> Any:
            return torch.storage._load_from_bytes, (inner,)

    with pytest.raises(ValueError, match=r"not a file of torch\.save|it uses torch"):
        decode("pyd", pickle.dumps(Storage()))


def test_other_classes_are_refused_by_name_unless_pickles_are_allowed() -> None:
    payload = saved({"x": slice(1, 2)})
    with pytest.raises(ValueError, match=r"it uses __builtin__\.slice, .*allow_pickle=True would load it"):
        decode("pt", payload)
    assert decode("pt", payload, allow_pickle=True) == {"x": slice(1, 2)}
