"""Recordings that are converted: NumPy archives and arrays, files of items, tables."""

import io
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from bench.campaign.fuzz.mutate import Mutation
from bench.campaign.fuzz.structures import mutate_npy, mutate_zip
from bench.campaign.fuzz.target import Run, SkippedInput, Target, WrongValueError, read_file
from bench.campaign.fuzz.targets.decoders import save_npy
from penstock.convert.inputs.arrays import NpyInput, NpzInput
from penstock.convert.inputs.files import FilesInput
from penstock.convert.splits import Split, parse_split
from penstock.convert.table import read_table
from penstock.core.errors import OptionError, ReadError, SourceError, WriteError
from penstock.recipes.cellmap.multi import CellMapDataSplit
from penstock.recipes.crossval.cross_validation import _read_file as read_features
from penstock.source.numpy_files import list_headers

__all__ = ["CONVERSIONS"]


def _read_first(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Return what opens a recording and reads its first and its last item."""

    def read(path: Path) -> None:
        recording = make(path).open()
        try:
            if recording.n_samples:
                list(recording.samples(np.array([0, recording.n_samples - 1])))
        finally:
            recording.close()

    return read


def _read_npz(path: Path) -> None:
    list_headers(path)
    _read_first(lambda _: NpzInput(path, scratch=path.parent))(path)


def _save_npz(save: Callable[..., None]) -> bytes:
    out = io.BytesIO()
    save(out, a=np.arange(12).reshape(6, 2), b=np.asfortranarray(np.arange(12.0).reshape(6, 2)))
    return out.getvalue()


def _read_item(path: Path) -> None:
    _read_first(FilesInput)(path)


_TABLES = (
    b"name,age,label\na,1,x\nb,2.5,y\n",
    b'name;age\n"a;b";1\n',
    b",x\n0,1e5\n1,nan\n",
    "\ufeffä\tb\n1\t2\n".encode(),
)


@cache
def _parquets() -> Sequence[bytes]:
    table = pa.table({"a": [1, 2, None], "b": ["x", "y", "z"], "c": [[1.5], [], None]})
    out = pa.BufferOutputStream()
    parquet.write_table(table, out)
    return [out.getvalue().to_pybytes()]


def _read_split(path: Path) -> None:
    CellMapDataSplit.from_csv(path)


def _prepare_text(_: Path) -> Run:
    def run(content: bytes) -> None:
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise SkippedInput from error
        split = Split(parse_split(text))
        if abs(sum(share for _, share in split.shares) - 1) > 1e-5:
            raise WrongValueError("the shares do not add up to 1")

    return run


def _features() -> Sequence[bytes]:
    out = io.BytesIO()
    np.savez(out, features=np.arange(8.0).reshape(4, 2), labels=np.array([0, 1, 0, 1]), authors=np.array(list("abab")))
    return [out.getvalue()]


_SPLITS = (b"split,raw,gt\ntrain,/a/b,/c/d\nvalidate,/e,/f\n", b"train,/a,b,/c,d\n")
_ZIP: tuple[Mutation, ...] = (mutate_zip(mutate_npy),)
_READING = (SourceError, ReadError)
_ROWS = (np.arange(12).reshape(6, 2), np.asfortranarray(np.arange(12.0).reshape(6, 2)))

CONVERSIONS = (
    Target(
        "npz-input",
        read_file("x.npz", _read_npz),
        lambda: [_save_npz(np.savez), _save_npz(np.savez_compressed)],
        (*_READING, WriteError),
        _ZIP,
        (b"PK\1\2", b"PK\5\6", b"PK\3\4"),
        weight=0.5,
        writes=("*",),  # compressed members are unpacked
    ),
    Target(
        "npy-input",
        read_file("x.npy", _read_first(NpyInput)),
        lambda: [save_npy(array) for array in _ROWS],
        _READING,
        (mutate_npy,),
        weight=0.5,
    ),
    Target("cls-input", read_file("x.cls", _read_item), lambda: [b"3", b"cat"], _READING, weight=0.3),
    Target(
        "table",
        read_file("x.csv", read_table),
        lambda: _TABLES,
        (SourceError, ReadError),
        (),
        (b'"', b"\0", b"9" * 400),
        weight=1,
    ),
    Target("parquet", read_file("x.parquet", read_table), _parquets, (SourceError, ReadError), weight=0.5),
    Target(
        "features",
        read_file("x.npz", read_features),
        _features,
        (SourceError, ReadError),
        (mutate_zip(mutate_npy),),
        weight=0.5,
    ),
    Target(
        "split-csv",
        read_file("x.csv", _read_split),
        lambda: _SPLITS,
        (OptionError,),
        (),
        (b'"', b"\0", b","),
        weight=0.3,
    ),
    Target(
        "split-text",
        _prepare_text,
        lambda: [b"train=0.8,val=0.2", b"a=1"],
        (OptionError,),
        (),
        (b"nan", b"inf", b"1e-400", b"=", b","),
        weight=0.3,
    ),
)
