"""Lists of dicts that are made when they are looked at."""

import copy
import gc
import json
import pickle
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import DamageError
from penstock.core.metadata.records import Records
from penstock.core.metadata.table import Computed, Constant, Origins, Payloads, RecordTable

DICTS = [{"trial": n, "subject": "AB"[n % 2], "tags": [n, n + 1]} for n in range(6)]


def of_json(values: list[Any]) -> Records:
    """Return records that are stored as JSON."""
    return Records.of_table(records_table(values))


def records_table(values: list[Any]) -> RecordTable:
    payloads = Payloads.join([json.dumps(value).encode() for value in values])
    return RecordTable(len(values), {}, payloads, json.loads)


def name_of(number: int, prefix: str) -> str:
    return f"{prefix}{number}"


def of_columns() -> Records:
    """Return the records `DICTS` and a name, stored in every kind of column, with a part of them in JSON."""
    columns = {
        "trial": np.arange(6),
        "subject": Payloads.join([b"AB"[n % 2 : n % 2 + 1] for n in range(6)]),
        "name": Computed(np.arange(6), partial(name_of, prefix="s")),
        "kinds": Constant(["x"]),
    }
    others = Payloads.join([json.dumps({"tags": [n, n + 1]}).encode() if n else b"" for n in range(6)])
    return Records.of_table(RecordTable(6, columns, others, json.loads))


@pytest.mark.parametrize("n_items", [6, 8])
def test_a_table_without_places_comes_first(n_items):
    records, part = Records([{"old": n} for n in range(n_items)]), records_table(DICTS)
    before = records.split([2, n_items - 2])
    records.put(None, part)
    assert records == [*DICTS, *({"old": n} for n in range(6, n_items))]
    assert before[1] == [{"old": n} for n in range(2, n_items)], "what was given out stays"
    records.put(np.array([4, 1]), records_table(DICTS[:2]))
    assert records[:6] == [DICTS[n] for n in (0, 1, 2, 3, 0, 5)]


def test_it_equals_the_list_of_its_dicts():
    records = of_json(DICTS)
    assert records == DICTS
    assert not DICTS != records  # noqa: SIM202, SIM300  # what is tested
    assert records == of_json(DICTS)
    assert records != DICTS[:5]
    assert list(records) == records.tolist() == DICTS
    assert (records[-1], records[np.int64(2)], len(records)) == (DICTS[5], DICTS[2], 6)
    assert list(reversed(records)) == DICTS[::-1]
    assert DICTS[3] in records
    assert records[1:4] == DICTS[1:4]
    assert records[:1] + [None] == [DICTS[0], None]  # noqa: RUF005  # what is tested
    with pytest.raises(IndexError, match=r"^Row -?\d+ does not exist: the metadata have \d+ rows?\.$"):
        records[6]


def test_it_is_a_sequence_for_those_who_ask():
    records = of_json(DICTS)
    assert isinstance(records, Sequence)
    assert (records.index(DICTS[2]), records.count(DICTS[2])) == (2, 1)
    match records:
        case [first, *_, last]:
            assert (first, last) == (DICTS[0], DICTS[5])
        case _:
            pytest.fail("it is no sequence for a match statement")


def test_items_are_chosen_by_arrays_tensors_and_lists():
    records = of_json(DICTS)
    for chosen in ([True, False] * 3, [0, 2, 4]):
        for which in (chosen, np.array(chosen), torch.tensor(chosen)):
            assert records[which] == DICTS[::2]
    assert records[torch.tensor(3)] == DICTS[3]


def test_columns_of_every_kind_make_the_same_dicts():
    records = of_columns()
    wanted = [{**one, "name": f"s{n}", "kinds": ["x"]} for n, one in enumerate(DICTS)]
    del wanted[0]["tags"]
    assert records == wanted
    assert [type(value) for value in records[1].values()] == [int, str, str, list, list]
    records[1]["kinds"].append("y")
    assert records[2]["kinds"] == ["x"]


def test_a_dict_is_made_once_and_keeps_its_changes():
    records = of_json(DICTS)
    records[2]["trial"] = 99
    assert records[2] is records[1:4][1]
    assert records.columns("trial")["trial"].tolist() == [0, 1, 99, 3, 4, 5]
    assert of_json(DICTS)[2]["trial"] == 2


def test_nothing_is_parsed_before_it_is_looked_at():
    parsed = []

    def parse(payload: bytes) -> Any:
        parsed.append(payload)
        return json.loads(payload)

    records = Records.of_table(RecordTable(3, {}, Payloads.join([b'{"a": 0}', b'{"a": 1}', b"["]), parse))
    some = records.choose(np.array([1, 1, 0])).split([2, 1])[0]
    other = Records.blank(4)
    other[np.array([3, 0])] = some
    assert not parsed
    assert other == [{"a": 1}, None, None, {"a": 1}]
    assert parsed == [b'{"a": 1}'] * 2


def test_columns_have_the_types_of_their_values():
    records = of_json(
        [{"n": 1, "x": 1, "t": "a", "b": True}, {"n": 2, "t": "b", "b": False}, {"n": 3, "x": 2.5, "b": True}]
    )
    found = records.columns()
    assert {name: str(array.dtype) for name, array in found.items()} == {
        "n": "int64", "x": "float64", "t": "object", "b": "bool",
    }  # fmt: skip
    assert found["t"].tolist() == ["a", "b", None]
    assert np.isnan(found["x"][1])
    assert of_columns().columns("trial")["trial"].dtype == np.int64
    assert of_columns().columns("subject")["subject"].tolist() == list("ABABAB")


def test_a_text_that_is_none_names_its_shard_and_item():
    origins = Origins(("a.tar", "b.tar"), np.array([0, 1]), np.array([4, 9]))
    records = Records.of_table(RecordTable(2, {"file": Payloads.join([b"ok", b"\xff"])}, origins=origins))
    assert records[0] == {"file": "ok"}
    for look in (lambda: records[1], lambda: list(records), lambda: records.columns("file"), records.check):
        with pytest.raises(DamageError, match="file") as caught:
            look()
        assert (caught.value.shard, caught.value.item) == ("b.tar", 9)


def test_a_damaged_row_names_its_shard_and_item():
    payloads = Payloads.join([b"{}", b"{"])
    origins = Origins(("a.tar", "b.tar"), np.array([0, 1]), np.array([5, 17]))
    records = Records.of_table(RecordTable(2, {}, payloads, json.loads, origins)).choose(np.array([1, 0]))
    assert records[1] == {}
    for one in (records, pickle.loads(pickle.dumps(records))):
        with pytest.raises(DamageError, match=r"item 17 in b\.tar"):
            one[0]
        with pytest.raises(DamageError, match=r"item 17 in b\.tar"):
            one.check()


@given(rows=st.lists(st.integers(0, 5), max_size=20), looked_at=st.sets(st.integers(0, 5)))
def test_choosing_pickling_and_copying_give_the_same_dicts(rows: list[int], looked_at: set[int]):
    for records in (of_json(DICTS), of_columns()):
        whole = copy.deepcopy(records.tolist())
        for row in looked_at:
            _ = records[row]
        chosen = records.choose(np.array(rows, np.int64))
        wanted = [whole[row] for row in rows]
        for one in (pickle.loads(pickle.dumps(chosen)), copy.copy(chosen), copy.deepcopy(chosen), chosen.compact()):
            assert one == wanted
        assert records[np.array(rows, np.int64)] == wanted
        other = Records([None] * len(rows))
        other[:] = chosen
        assert other == chosen == wanted
        assert np.asarray(other).tolist() == wanted


def test_a_pickle_has_no_other_rows_and_no_arrays_out_of_band():
    records = of_json([{"text": "x" * 1000}] * 100)
    buffers: list[Any] = []
    pickled = pickle.dumps(records.split([3, 2])[1], protocol=5, buffer_callback=buffers.append)
    assert len(pickled) < 4000
    assert not buffers


def test_a_compact_part_keeps_no_memory_of_the_rest():
    class Table(RecordTable):
        __slots__ = ("__weakref__",)

    table = Table(100, {"n": np.arange(100)})
    records = Records.of_table(table)
    kept, is_alive = [records.split([4, 1])[1].compact(), records[7]], weakref.ref(table)
    del records, table
    gc.collect()
    assert is_alive() is None
    assert kept == [[{"n": 4}], {"n": 7}]


def test_its_repr_shows_the_first_ones():
    assert repr(Records([{"a": 1}])) == "Records([{'a': 1}])"
    assert repr(of_json([{}] * 5)) == "Records([{}, {}, {}, … 2 more])"


def test_one_value_is_put_into_every_row():
    records = of_json(DICTS)
    records[1:3] = None
    records[0] = {"a": 1}
    assert records == [{"a": 1}, None, None, *DICTS[3:]]


def test_values_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="2 values do not fit into 3 rows"):
        Records.blank(3)[:] = [{}, {}]
