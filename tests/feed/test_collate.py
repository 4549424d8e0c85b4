"""What a batch looks like: tensors, lists, tuples, mappings, and the mask of a padded one."""

from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import MixedSource, Numbers, Pairs, Records, Together, numbered_source, to_plain, with_noise

from penstock import ArraySource, DatasetSource, Loader, OptionError, Plan, RunOptions, Sequential, Shuffle
from penstock.feed.collate import collate_block

THREADS = RunOptions(executor="threads")
FORK = RunOptions(executor="processes", start_method="fork")


def batches(source: Any, *, batch_size: int = 4, tail: Any = "short", order: Any = None, **others: Any) -> list[Any]:
    plan = Plan(source.index, order or Sequential(), batch_size=batch_size, tail=tail)
    with Loader(source, plan, **others) as loader:
        return list(loader)


class TestArrays:
    @pytest.mark.parametrize(
        ("dtype", "torch_dtype"),
        [
            ("f4", torch.float32),
            (">f8", torch.float64),
            ("f2", torch.float16),
            ("?", torch.bool),
            ("u1", torch.uint8),
            ("u2", torch.uint16),
            ("u4", torch.uint32),
            (">i2", torch.int16),
            ("c8", torch.complex64),
        ],
    )
    def test_a_field_becomes_a_tensor_of_its_dtype(self, dtype: str, torch_dtype: torch.dtype) -> None:
        values = (np.arange(12).reshape(6, 2) % 2 if dtype == "?" else np.arange(12).reshape(6, 2)).astype(dtype)
        found = batches(ArraySource({"a": values}))
        assert [batch["a"].dtype for batch in found] == [torch_dtype, torch_dtype]
        assert torch.cat([batch["a"] for batch in found]).tolist() == values.tolist()

    @pytest.mark.parametrize("workers", [0, 2])
    def test_tensors_can_be_written_to(self, workers: int) -> None:
        for batch in batches(numbered_source(8), num_workers=workers):
            batch["y"] += 1
            assert batch["y"][:, 0].tolist() == [item + 1 for item in batch["x"].tolist()]

    @pytest.mark.parametrize("options", [None, THREADS, FORK], ids=["inline", "threads", "fork"])
    @pytest.mark.parametrize("transform", [None, lambda item, rng: item], ids=["as read", "item by item"])
    def test_strings_arrive_as_lists(self, options: Any, transform: Any) -> None:
        source = ArraySource({"name": np.array([f"unit {n}" for n in range(6)]), "x": np.arange(6)})
        found = batches(source, transform=transform, num_workers=0 if options is None else 1, options=options)
        assert [batch["name"] for batch in found] == [["unit 0", "unit 1", "unit 2", "unit 3"], ["unit 4", "unit 5"]]
        assert all(type(name) is str or isinstance(name, str) for batch in found for name in batch["name"])
        assert found[1]["x"].tolist() == [4, 5]

    def test_bytes_arrive_as_lists(self) -> None:
        assert batches(ArraySource({"raw": np.array([b"ab", b"c"])}))[0]["raw"] == [b"ab", b"c"]

    @pytest.mark.parametrize("options", [None, THREADS, FORK], ids=["inline", "threads", "fork"])
    def test_dates_durations_and_structured_arrays_arrive_as_lists(self, options: Any) -> None:
        trials = np.array([(i, i / 2) for i in range(6)], [("trial", "i4"), ("onset", "f8")])
        fields = {
            "when": np.arange(6).astype("M8[s]"),
            "times": np.arange(12).reshape(6, 2).astype("M8[ns]"),
            "took": np.arange(6).astype("m8[ms]"),
            "trial": trials,
            "trials": np.stack([trials, trials[::-1]], axis=1),
        }
        found = batches(ArraySource(fields), num_workers=0 if options is None else 1, options=options)
        for name, array in fields.items():
            values = [value for batch in found for value in batch[name]]
            assert [value.dtype for value in values] == [array.dtype] * 6
            assert [value.tobytes() for value in values] == [row.tobytes() for row in array]

    @pytest.mark.parametrize("options", [None, THREADS], ids=["inline", "threads"])
    def test_a_dtype_without_a_tensor_is_refused_by_field(self, options: Any) -> None:
        source = ArraySource({"x": np.arange(6), "when": np.zeros(6, "g")})
        with pytest.raises(OptionError, match=r"'when' must have a dtype that torch supports.*transform"):
            batches(source, num_workers=0 if options is None else 1, options=options)

    def test_a_transform_can_convert_a_dtype_without_a_tensor(self) -> None:
        source = ArraySource({"when": np.arange(6).astype("M8[s]")})
        found = batches(source, transform=lambda item, rng: {"seconds": item["when"].astype(np.int64)})
        assert [batch["seconds"].tolist() for batch in found] == [[0, 1, 2, 3], [4, 5]]

    def test_items_without_elements_stay_empty(self) -> None:
        found = batches(ArraySource({"nothing": np.zeros((6, 0, 3), "f4"), "x": np.arange(6)}))
        assert [tuple(batch["nothing"].shape) for batch in found] == [(4, 0, 3), (2, 0, 3)]

    def test_with_a_transform_a_batch_holds_its_results(self) -> None:
        found = batches(numbered_source(6), transform=lambda item, rng: (item["x"] * 2, {"y": item["y"]}))
        assert type(found[0]) is tuple
        assert found[0][0].tolist() == [0, 2, 4, 6]
        assert found[1][1]["y"].tolist() == [[4, 4.25], [5, 5.25]]

    def test_a_transform_may_change_its_item_in_place_without_changing_the_source(self) -> None:
        def negate(item: Any, rng: Any) -> Any:
            item["y"] *= -1
            return item

        source = numbered_source(6)
        for _ in range(2):
            assert batches(source, transform=negate)[1]["y"].tolist() == [[-4, -4.25], [-5, -5.25]]
        assert source.take(np.array([5]))["y"].tolist() == [[5, 5.25]]

    def test_collate_gets_the_items_of_a_batch_in_order(self) -> None:
        found = batches(numbered_source(6), collate=lambda items: [int(item["x"]) for item in items])
        assert found == [[0, 1, 2, 3], [4, 5]]

    def test_items_that_cannot_be_stacked_raise_an_error_with_the_cure(self) -> None:
        ragged = DatasetSource([torch.zeros(n) for n in range(1, 5)])
        with pytest.raises(RuntimeError, match="stack") as caught:
            batches(ragged)
        assert any("collate=" in note for note in caught.value.__notes__)
        assert any("batch 0 of epoch 0" in note for note in caught.value.__notes__)


class TestObjects:
    """Fields without a fixed shape, beside one that has it."""

    @pytest.mark.parametrize("options", [None, THREADS, FORK], ids=["inline", "threads", "fork"])
    def test_objects_arrive_as_a_list_beside_the_tensors(self, options: Any) -> None:
        found = batches(MixedSource(6), num_workers=0 if options is None else 1, options=options)
        assert [batch["x"].tolist() for batch in found] == [[0, 1, 2, 3], [4, 5]]
        assert [batch["note"] for batch in found] == [[{"item": n} for n in items] for items in (range(4), range(4, 6))]

    def test_arrays_among_the_objects_become_tensors_on_their_own_memory(self) -> None:
        ragged = np.empty(3, object)
        ragged[:] = [np.arange(n, dtype=np.int16) for n in range(3)]
        batch = collate_block({"ragged": ragged, "x": np.arange(3)})
        assert [(type(value), value.dtype, value.tolist()) for value in batch["ragged"]] == [
            (torch.Tensor, torch.int16, list(range(n))) for n in range(3)
        ]
        batch["ragged"][2][0] = 9
        assert ragged[2][0] == 9

    def test_objects_that_are_no_arrays_are_the_very_same(self) -> None:
        values = np.empty(5, object)
        values[:] = [{"a": 1}, None, "left", b"raw", [1, 2]]
        batch = collate_block({"note": values})
        assert all(found is given for found, given in zip(batch["note"], values, strict=True))

    def test_strings_in_an_array_among_the_objects_become_lists(self) -> None:
        values = np.empty(2, object)
        values[:] = [np.array(["left", "right"]), np.array(["up"])]
        assert collate_block({"names": values})["names"] == [["left", "right"], ["up"]]

    def test_dates_in_an_array_among_the_objects_become_lists(self) -> None:
        values = np.empty(2, object)
        values[:] = [np.arange(2).astype("M8[s]"), np.arange(1).astype("M8[s]")]
        found = collate_block({"when": values})["when"]
        assert [[str(date)[-2:] for date in dates] for dates in found] == [["00", "01"], ["00"]]

    def test_an_array_without_a_tensor_among_the_objects_is_refused_by_field(self) -> None:
        values = np.empty(1, object)
        values[:] = [np.zeros(2, "g")]
        with pytest.raises(OptionError, match=r"'when' must have a dtype that torch supports"):
            collate_block({"when": values})

    def test_a_padded_batch_of_objects_says_which_are_padding(self) -> None:
        second = batches(MixedSource(6), tail="pad")[1]
        assert second["mask"].tolist() == [True, True, False, False]
        assert [note["item"] for note in second["note"]] == second["x"].tolist()


class TestDatasets:
    def test_lists_give_lists(self) -> None:
        source = DatasetSource([[0, 10], [1, 11]])
        with Loader(source, Plan(source.index, Sequential(), batch_size=2)) as loader:
            (batch,) = loader
        assert isinstance(batch, list)
        assert [part.tolist() for part in batch] == [[0, 1], [10, 11]]

    def test_tuples_give_tuples(self) -> None:
        found = batches(DatasetSource(Pairs(6)))
        assert [type(batch) for batch in found] == [tuple, tuple]
        assert [batch[1].tolist() for batch in found] == [[0, 1, 2, 3], [4, 5]]
        assert found[1][0].tolist() == [[4, 4.5], [5, 5.5]]

    def test_mappings_give_mappings_however_deep(self) -> None:
        (batch,) = batches(DatasetSource(Records(4)))
        assert to_plain(batch["x"]) == [0, 1, 2, 3]
        assert batch["name"] == ["item 0", "item 1", "item 2", "item 3"]
        assert to_plain(batch["deep"]["pair"][0]) == [0, 1, 2, 3]
        assert to_plain(batch["deep"]["pair"][1]) == [[0, 0], [1, -1], [2, -2], [3, -3]]

    def test_single_tensors_give_single_tensors(self) -> None:
        assert [batch.tolist() for batch in batches(DatasetSource(Numbers(6)))] == [[0, 1, 2, 3], [4, 5]]

    def test_numbers_give_tensors(self) -> None:
        assert [batch.tolist() for batch in batches(DatasetSource([5, 6, 7]))] == [[5, 6, 7]]

    @pytest.mark.parametrize("kind", [Numbers, Pairs, Records, Together])
    def test_values_are_those_of_torchs_own_loader(self, kind: Any) -> None:
        source, dataset = DatasetSource(kind(11)), kind(11)
        plan = Plan(source.index, Shuffle(), batch_size=4, tail="short", seed=3)
        order = [plan.epoch(0).draw(n).items.tolist() for n in range(plan.n_batches)]
        torchs = torch.utils.data.DataLoader(dataset, batch_sampler=order)
        with Loader(source, plan) as loader:
            for found, wanted in zip(loader, torchs, strict=True):
                # Torch makes a list of a batch of tuples; here tuples stay tuples.
                kept = list(found) if isinstance(found, tuple) else found
                assert to_plain(kept) == to_plain(wanted)


class TestPadding:
    """Six items in batches of four: the second batch is half padding."""

    @pytest.mark.parametrize("transform", [None, lambda item, rng: item], ids=["as read", "item by item"])
    @pytest.mark.parametrize("options", [None, THREADS, FORK], ids=["inline", "threads", "fork"])
    def test_a_mapping_gets_a_mask_by_name(self, options: Any, transform: Any) -> None:
        workers = 0 if options is None else 1
        first, second = batches(
            numbered_source(6), tail="pad", transform=transform, num_workers=workers, options=options
        )
        assert list(first) == ["x", "y", "mask"]
        assert (first["mask"].dtype, first["mask"].tolist()) == (torch.bool, [True] * 4)
        assert second["mask"].tolist() == [True, True, False, False]
        assert second["x"].tolist()[:2] == [4, 5]
        assert len(second["x"]) == 4

    def test_a_tuple_gets_a_mask_at_the_end(self) -> None:
        first, second = batches(DatasetSource(Pairs(6)), tail="pad")
        assert [len(first), len(second)] == [3, 3]
        assert second[2].tolist() == [True, True, False, False]
        assert second[1].tolist()[:2] == [4, 5]

    def test_a_single_tensor_comes_with_its_mask(self) -> None:
        for batch, items in zip(batches(DatasetSource(Numbers(6)), tail="pad"), ([0, 1, 2, 3], [4, 5]), strict=True):
            values, mask = batch
            assert values[mask].tolist() == items

    def test_the_result_of_collate_gets_a_mask_as_well(self) -> None:
        found = batches(numbered_source(6), tail="pad", collate=lambda items: [int(item["x"]) for item in items])
        assert [(values[:2], mask.tolist()) for values, mask in found] == [
            ([0, 1], [True] * 4),
            ([4, 5], [True, True, False, False]),
        ]

    @pytest.mark.parametrize("tail", ["drop", "short"])
    def test_there_is_no_mask_if_nothing_is_padded(self, tail: Any) -> None:
        assert all("mask" not in batch for batch in batches(numbered_source(6), tail=tail))

    def test_masks_are_not_shared_between_batches(self) -> None:
        found = batches(numbered_source(12), tail="pad")
        found[0]["mask"][0] = False
        assert found[1]["mask"].tolist() == [True] * 4

    def test_a_field_named_mask_is_refused_when_the_loader_is_made(self) -> None:
        source = ArraySource({"x": np.arange(6), "mask": np.ones(6)})
        plan = Plan(source.index, Sequential(), batch_size=4, tail="pad")
        with pytest.raises(OptionError, match=r"'mask'.*Rename"):
            Loader(source, plan)

    @pytest.mark.parametrize("tail", ["drop", "short"])
    def test_a_field_named_mask_is_allowed_if_nothing_is_padded(self, tail: Any) -> None:
        source = ArraySource({"x": np.arange(6), "mask": np.arange(6)})
        assert batches(source, tail=tail)[0]["mask"].tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize("kind", ["dataset", "transform", "collate"])
    def test_a_mask_of_the_user_is_never_overwritten(self, kind: str) -> None:
        def with_mask(item: Any, rng: Any = None) -> Any:
            return {"x": item["x"], "mask": item["x"] * 10}

        others: dict[str, Any] = {}
        source: Any = numbered_source(6)
        if kind == "dataset":
            source = DatasetSource([with_mask({"x": n}) for n in range(6)])
        elif kind == "transform":
            others["transform"] = with_mask
        else:
            others["collate"] = lambda items: {"mask": [int(item["x"]) for item in items]}
        with pytest.raises(OptionError, match="mask"):
            batches(source, tail="pad", **others)


class TestRandomness:
    @pytest.mark.parametrize("options", [THREADS, FORK], ids=["threads", "fork"])
    def test_each_item_has_its_own_bits_wherever_it_is_made(self, options: RunOptions) -> None:
        source = numbered_source(12)
        alone = [to_plain(batch) for batch in batches(source, order=Shuffle(), transform=with_noise)]
        found = batches(source, order=Shuffle(), transform=with_noise, num_workers=2, options=options)
        assert [to_plain(batch) for batch in found] == alone
        assert len({bits for batch in alone for bits in batch["noise"]}) == 12

    def test_the_bits_of_an_item_do_not_depend_on_its_batch(self) -> None:
        def bits(batch_size: int) -> dict[int, int]:
            found = batches(numbered_source(12), batch_size=batch_size, order=Shuffle(), transform=with_noise)
            return {x: noise for batch in found for x, noise in zip(*map(to_plain, batch.values()), strict=True)}

        assert bits(4) == bits(5) == bits(12)
