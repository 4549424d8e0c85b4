"""Arrow, Feather and Parquet files that are damaged: read, or a PenstockError that names them; never a crash."""

import os
import random
import resource
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from penstock_test_parts import run_isolated
from pyarrow import feather, ipc, parquet

from penstock import DamageError, Span, TableSource
from penstock.convert.table import read_table
from penstock.core.errors import PenstockError

SOAK = os.environ.get("PENSTOCK_TESTS") == "soak"
N = 300
LENGTHS = np.arange(N) % 4 + 1
COLUMNS: dict[str, pa.Array] = {
    "number": pa.array(np.arange(N)),
    "gaps": pa.array([None if n % 7 == 0 else n / 4 for n in range(N)]),
    "text": pa.array(["é" * n for n in LENGTHS]),
    "raw": pa.array([b"\xff" * n for n in LENGTHS]),
    "list": pa.array([[7] * n for n in LENGTHS], pa.list_(pa.int32())),
    "nested": pa.array([[["a" * n]] for n in LENGTHS]),
    "record": pa.array([{"n": n, "text": str(n)} for n in range(N)]),
    "category": pa.array([f"category {n}" for n in LENGTHS]).dictionary_encode(),
}


def write(path: Path, kind: str, columns: Iterable[str] = COLUMNS) -> Path:
    table = pa.table({name: COLUMNS[name] for name in columns})
    if kind == "stream":
        with ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    elif kind == "parquet":
        parquet.write_table(table, path, row_group_size=100)
    else:
        feather.write_feather(table, path, compression=kind, chunksize=100)
    return path


def read_all(path: Path) -> None:
    source = TableSource(path, decoded_bytes=0)
    n_rows = len(source.index)
    source.read(Span(0, n_rows))
    source.take(np.arange(n_rows)[::-7])
    source.close()


def outcomes(path: Path, flips: list[tuple[int, int]]) -> list[str]:
    """Return what happens with one bit flipped, for each (byte, bit)."""
    whole, found = path.read_bytes(), set()
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    for byte, bit in flips:
        damaged = bytearray(whole)
        damaged[byte] ^= 1 << bit
        path.write_bytes(damaged)
        try:
            read_all(path)
            found.add("read")
        except PenstockError as error:
            found.add("named" if str(path) in str(error) else f"bit {bit} of byte {byte}: not named: {error}")
        except Exception as error:
            found.add(f"bit {bit} of byte {byte}: {error!r}")
    return sorted(found)


@pytest.mark.parametrize("column", ["text", "raw", "list", "nested"])
@pytest.mark.parametrize("kind", ["uncompressed", "stream"])
def test_an_offset_that_is_wrong_is_damage_of_the_record_batch(kind: str, column: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", kind, [column])
    # Of the values of row 0 to 99; the offsets of the second batch begin at 0, too.
    ends = np.cumsum(LENGTHS[:100] * (2 if column == "text" else 1), dtype=np.int32)
    sizes = np.arange(1, 101, dtype=np.int32) if column == "nested" else ends
    begin = path.read_bytes().index(sizes.tobytes())
    flips = [(begin + 4 * row + bit // 8, bit % 8) for row in (0, 50, 99) for bit in (9, 17, 25, 30, 31)]
    assert run_isolated(outcomes, path, flips) == ["named"]
    damaged = bytearray(write(path, kind, [column]).read_bytes())
    damaged[begin + 4 * 50 + 3] ^= 4
    path.write_bytes(damaged)
    source = TableSource(path)
    assert len(source.take(np.array([100, 299]))[column]) == 2
    with pytest.raises(DamageError, match=r"a\.arrow: record batch 0: .*[Oo]ffset"):
        source.take(np.array([3]))


@pytest.mark.parametrize("column", ["number", "list", "text"])
def test_a_damaged_footer_of_a_parquet_file_is_read_or_an_error_that_names_it(column: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", "parquet", [column])
    size = path.stat().st_size
    footer = int.from_bytes(path.read_bytes()[-8:-4], "little")
    assert 300 < footer < 2000
    flips = [(byte, byte % 8) for byte in range(size - 8 - footer, size, 1 if SOAK else 3)]
    assert run_isolated(outcomes, path, flips) == ["named", "read"]


@pytest.mark.parametrize("kind", ["uncompressed", "stream", "lz4", "parquet"])
def test_a_damaged_table_is_read_or_an_error_that_names_it(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"a.{'parquet' if kind == 'parquet' else 'arrow'}", kind)
    rng, size = random.Random(7), path.stat().st_size
    flips = [(rng.randrange(size), rng.randrange(8)) for _ in range(5000 if SOAK else 100)]
    assert run_isolated(outcomes, path, flips, seconds=600 if SOAK else 60) == ["named", "read"]


def test_a_text_that_is_none_is_damage_where_a_conversion_reads_a_table(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["one", "two"]}), path, compression="none", use_dictionary=False)
    path.write_bytes(path.read_bytes().replace(b"two", b"t\xffo"))
    for read, message in ((read_all, "row group 0: .*UTF"), (read_table, "as a Parquet table: .*UTF")):
        with pytest.raises(PenstockError, match=rf"a\.parquet.*{message}"):
            read(path)
