"""Golden values: one order of every kind.

Changing any value here is a breaking change: saved states would resume in another order, published results could not be
repeated. If it must be, raise the version of the saved state (plan/cursor.py) and say so in the changelog.
"""

import numpy as np
import pytest

from penstock.core.index import Index
from penstock.core.seeds import generator_for, key_for, mix64, subkeys
from penstock.core.types import Draw
from penstock.plan.balanced import Balanced, BalancedSpans
from penstock.plan.lengths.near import Bucketed, TokenBudget
from penstock.plan.lengths.packed import Packed
from penstock.plan.mixed.order import Mixed, MixedPart
from penstock.plan.orders import Listed, RandomChunks, Sequential, Shuffle, Subset, WindowShuffle
from penstock.plan.permute import permute
from penstock.plan.plan import Plan, Segments
from penstock.plan.window_batches import ListedChunks, PartitionChunks, WindowBatches
from penstock.plan.world import World

CHUNKED = Index.from_sizes([4, 7, 3, 6])
LABELS = ["rare"] * 3 + ["common"] * 17
MIXED = (
    MixedPart("a", Index.from_sizes([4, 7]), Shuffle()),
    MixedPart("b", Index.from_sizes([3, 6]), WindowShuffle(1)),
)
LARGE = Index.uniform(1000, 20)
TOKENS = [3, 14, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]

ORDERS = [
    (
        Plan(CHUNKED, Sequential(), batch_size=5, seed=42, tail="short"),
        [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14], [15, 16, 17, 18, 19]],
        "e8380b2df9ade245",
    ),
    (
        Plan(CHUNKED, Shuffle(), batch_size=5, seed=42, tail="short"),
        [[4, 16, 19, 9, 11], [2, 8, 18, 15, 6], [13, 12, 10, 1, 17], [5, 14, 0, 7, 3]],
        "e637bad761185a0c",
    ),
    (
        Plan(CHUNKED, Shuffle(), batch_size=5, seed=42, lanes=3, tail="pad"),
        [[13, 12, 10, 1, 17], [4, 16, 19, 9, 11], [2, 8, 18, 15, 6], [5, 14, 0, 7, 3]],
        "7efeedf7651857ee",
    ),
    (
        Plan(CHUNKED, WindowShuffle(2), batch_size=5, seed=42, tail="short"),
        [[3, 15, 17, 1, 14], [18, 0, 16, 19, 2], [8, 5, 4, 11, 12], [13, 9, 10, 7, 6]],
        "eac0abc6d259022b",
    ),
    (
        Plan(CHUNKED, WindowShuffle(2), batch_size=4, seed=42, lanes=2, tail="pad"),
        [[19, 2, 8, 5], [3, 15, 17, 1], [4, 11, 12, 13], [14, 18, 0, 16], [9, 10, 7, 6]],
        "df2f4ecce7607d25",
    ),
    (
        Plan(CHUNKED.select(range(0, 20, 2)), WindowShuffle(3), batch_size=4, seed=42, tail="short"),
        [[6, 10, 16, 2], [8, 18, 0, 14], [4, 12]],
        "84c69641e0dc8107",
    ),
    (
        Plan(CHUNKED, RandomChunks(4, count=4), batch_size=4, seed=42, tail="drop"),
        [[14, 15, 16, 17], [2, 3, 4, 5], [7, 8, 9, 10], [3, 4, 5, 6]],
        "32d106b8d413ecc4",
    ),
    (
        Plan(CHUNKED, RandomChunks(6, align=2, shuffle=True), batch_size=6, seed=42, tail="drop"),
        [[4, 8, 6, 7, 9, 5], [13, 12, 8, 11, 9, 10], [10, 14, 13, 11, 12, 15]],
        "f6c2fcb052c3629f",
    ),
    (
        Plan(CHUNKED, Balanced(LABELS, length=20), batch_size=5, seed=42, tail="drop"),
        [[1, 1, 0, 10, 8], [14, 0, 13, 16, 17], [0, 1, 0, 9, 19], [2, 7, 4, 2, 2]],
        "e122022e56337448",
    ),
    (
        Plan(CHUNKED, Balanced(LABELS, weights={"rare": 0.2, "common": 0.8}), batch_size=5, seed=42, tail="drop"),
        [[1, 18, 2, 10, 8], [14, 11, 13, 16, 17], [2, 12, 15, 9, 19], [3, 7, 4, 6, 0]],
        "38b7eb6a20e91c98",
    ),
    (
        Plan(CHUNKED, Subset(8), batch_size=4, seed=42, tail="drop"),
        [[10, 13, 2, 7], [18, 12, 5, 16]],
        "14f216fe2f0a4bd3",
    ),
    (
        Plan(CHUNKED, Subset(12, near=3, window=2), batch_size=4, seed=42, tail="drop"),
        [[7, 8, 13, 18], [5, 16, 12, 3], [2, 4, 9, 10]],
        "c3c9f7872a62e1ef",
    ),
    (
        Plan(CHUNKED, BalancedSpans((0, 5), (0.25, 0.75), length=12), batch_size=4, seed=42, tail="drop"),
        [[17, 18, 15, 5], [11, 13, 1, 7], [10, 0, 2, 16]],
        "5648664d6309743c",
    ),
    (
        Plan(CHUNKED, Listed([3, 1, 3, 19, 0, 7, 7, 2]), batch_size=4, seed=42, tail="drop"),
        [[3, 1, 3, 19], [0, 7, 7, 2]],
        "d9ab82ba76f72211",
    ),
    (
        Plan(CHUNKED, Mixed(MIXED, ((0, (3, 2)),), "first"), batch_size=5, seed=42, tail="short"),
        [[10, 11, 3, 13, 8], [1, 15, 5, 17, 9], [4, 14, 2, 18, 6], [0, 19, 7]],
        "dd1a5426bb48a4ac",
    ),
    (
        Plan(CHUNKED, Mixed(MIXED, ((0, (3, 1)),), "all", homogeneous=True), batch_size=5, seed=42, tail="short"),
        [
            [5, 1, 0, 7, 9],
            [10, 6, 0, 2, 1],
            [4, 3, 5, 8, 10],
            [17, 14, 18, 19, 16],
            [8, 4, 2, 3, 9],
            [7, 5, 1, 6, 0],
            [3, 9, 4, 5, 8],
            [11, 12, 13, 16, 17],
        ],
        "e8315e32c47b114b",
    ),
    (
        Plan(CHUNKED, Mixed(MIXED, ((0, (3, 1)), (2, (1, 2))), 17), batch_size=5, seed=42, tail="short"),
        [[9, 11, 13, 10, 15], [17, 3, 14, 18, 8], [19, 16, 1, 11, 12], [5, 13]],
        "2843d5c4b7819265",
    ),
    (
        Plan(CHUNKED, WindowShuffle(2, permute_chunks=False), batch_size=4, seed=42, tail="drop"),
        [[3, 5, 7, 1], [4, 8, 0, 6], [10, 2, 9, 15], [12, 11, 18, 19], [13, 16, 17, 14]],
        "9c8abaaa1b06fe52",
    ),
    (
        Plan(CHUNKED, WindowShuffle(2, permute_items=False), batch_size=4, seed=42, tail="drop"),
        [[0, 1, 2, 3], [14, 15, 16, 17], [18, 19, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13]],
        "7cab031b2b18d599",
    ),
    (
        Segments(Plan(CHUNKED, Shuffle(), batch_size=6, seed=42, tail="drop"), length=4),
        [[11, 2, 8, 18, 15, 6], [13, 12, 10, 1, 17, 5], [14, 0, 7, 3, 8, 14], [13, 7, 11, 16, 3, 9]],
        "189b92341c68d8c2",
    ),
    (
        Segments(Plan(CHUNKED, WindowShuffle(2), batch_size=6, seed=42, lanes=2, tail="drop"), length=4),
        [[8, 5, 4, 11, 12, 13], [14, 18, 0, 16, 19, 2], [9, 10, 7, 6, 19, 9], [18, 16, 5, 14, 7, 13]],
        "eb5f05182b2fc78e",
    ),
    (
        Segments(Plan(CHUNKED, Shuffle(), batch_size=6, seed=42, tail="short"), length=2),
        [[16, 19, 7, 6, 2, 14], [9, 4]],
        "08bcaa231e1235e0",
    ),
    (
        Bucketed(CHUNKED, TOKENS, batch_size=4, seed=42, width=3),
        [[12, 10, 3, 9], [5, 16, 18, 2], [8, 14, 0, 15], [6, 7, 19, 17], [4, 11, 13, 1]],
        "61989023d4f886aa",
    ),
    (
        Bucketed(CHUNKED, TOKENS, batch_size=3, seed=42, tail="drop"),
        [[10, 4, 17], [7, 9, 3], [14, 16, 18], [19, 12, 6], [1, 11, 13], [8, 15, 0]],
        "0b8ca394999c7453",
    ),
    (
        Bucketed(CHUNKED.select(range(0, 20, 2)), TOKENS, batch_size=4, seed=42, tail="pad"),
        [[6, 12, 10, 4], [2, 0, 2, 0], [8, 18, 16, 14]],
        "13ef5411f14de7ee",
    ),
    (
        TokenBudget(CHUNKED, TOKENS, max_tokens=20, seed=42),
        [[17, 13], [12, 10], [6, 19, 9], [11, 4], [1], [18, 3, 7, 16], [8, 5, 15, 14, 0, 2]],
        "293f9b812d8d0ed0",
    ),
    (
        TokenBudget(
            CHUNKED, TOKENS, max_tokens=16, max_items=3, seed=42, too_long="truncate", pad_to_multiple_of=4, tail="pad"
        ),
        [[2, 5, 2], [6, 9], [4], [11], [1], [10, 17], [7, 3], [14, 16, 18], [15, 8, 0], [12, 19], [13]],
        "145d711ffbdbb1d2",
    ),
    (
        TokenBudget(CHUNKED, TOKENS, max_tokens=9, seed=42, too_long="drop", tail="drop"),
        [[9], [19], [4], [10], [13], [17], [0, 8, 14], [3], [7], [12], [11], [6], [18, 16]],
        "7f4d2f1f3d13d569",
    ),
    (
        Packed(CHUNKED, TOKENS, length=16, batch_size=2, seed=42),
        [[1, 15, 3, 9, 7, 2], [11, 19, 18, 8, 0, 16, 14], [17, 10, 4, 12], [5, 13, 6]],
        "1cc71a202101b7dd",
    ),
    (
        Packed(CHUNKED, TOKENS, length=16, batch_size=2, seed=42, split=True),
        [[12, 10, 17, 17, 13], [11, 4, 3, 6, 19], [2, 15, 5, 8, 0, 14, 16, 16, 18, 9, 7, 3], [4, 1]],
        "87a71c04b531ab15",
    ),
    (
        Packed(CHUNKED, TOKENS, length=8, batch_size=3, seed=42, too_long="truncate", tail="drop"),
        [[9, 0, 13, 18, 14, 2], [1, 10, 3, 8], [19, 15, 4, 11], [7, 16, 17, 6, 5]],
        "7bb363da5e0304b0",
    ),
    (
        WindowBatches(CHUNKED, ListedChunks(((2, 7), (0, 3), (5, 9))), seed=42),
        [[2, 3, 4, 5, 6], [0, 1, 2], [5, 6, 7, 8]],
        "3a234de1704d1dc9",
    ),
    (
        WindowBatches(CHUNKED, PartitionChunks(6), seed=42),
        [[17, 18, 19], [11, 12, 13, 14, 15, 16], [5, 6, 7, 8, 9, 10], [0, 1, 2, 3, 4]],
        "20b89422e94a2f95",
    ),
    (
        WindowBatches(CHUNKED, RandomChunks(5, count=4), seed=42),
        [[2, 3, 4, 5, 6], [4, 5, 6, 7, 8], [5, 6, 7, 8, 9], [15, 16, 17, 18, 19]],
        "e7b7dd0d3bed505a",
    ),
]

LONG_ORDERS = [
    (
        Plan(LARGE, Shuffle(), batch_size=64, seed=42, tail="drop"),
        "c2e9c8eeefcd120d",
        "8c82efbba12bf086",
        [611, 360, 605, 659, 268, 319],
    ),
    (
        Plan(LARGE, WindowShuffle(8), batch_size=64, seed=42, lanes=4, tail="pad"),
        "96bb6d9769301619",
        "bd7527c365b65227",
        [873, 866, 876, 120, 534, 533],
    ),
    (
        Plan(LARGE, RandomChunks(300, shuffle=True), batch_size=64, seed=42, tail="drop"),
        "475d36c59714d67e",
        "4242cd8e3a88376e",
        [513, 584, 667, 660, 510, 574],
    ),
    (
        Plan(LARGE, Balanced(np.arange(1000) % 3, length=5000), batch_size=64, seed=42, tail="drop"),
        "f6fa651abf6a30bf",
        "1c2ef125bd3b5c58",
        [633, 171, 201, 545, 724, 922],
    ),
    (
        Plan(LARGE, Subset(500), batch_size=64, seed=42, tail="drop"),
        "5453d745d89a26e6",
        "935fa955b5fe93c3",
        [381, 644, 521, 402, 166, 221],
    ),
    (
        Segments(Plan(LARGE, WindowShuffle(8), batch_size=64, seed=42, lanes=4, tail="drop"), length=40),
        "383ce22bb0198043",
        "846e66127c675d92",
        [810, 283, 721, 218, 357, 340],
    ),
]

RANKS = [
    (
        Plan(CHUNKED, Shuffle(), batch_size=3, seed=42, lanes=2, tail="drop"),
        [[[4, 16, 19], [9, 11, 2], [8, 18, 15]], [[6, 13, 12], [10, 1, 17], [5, 14, 0]]],
    ),
    (
        Plan(CHUNKED, Shuffle(), batch_size=3, seed=42, lanes=2, tail="short"),
        [[[6, 13, 12], [10, 1, 17], [5, 14, 0], [7]], [[4, 16, 19], [9, 11, 2], [8, 18, 15], [3]]],
    ),
    (
        Plan(CHUNKED, Shuffle(), batch_size=3, seed=42, lanes=2, tail="pad"),
        [[[6, 13, 12], [10, 1, 17], [5, 14, 0], [7, 3]], [[4, 16, 19], [9, 11, 2], [8, 18, 15], []]],
    ),
    (
        Plan(CHUNKED, WindowShuffle(2), batch_size=3, seed=42, lanes=4, tail="drop"),
        [[[0, 16, 19], [3, 15, 17], [2, 8, 5]], [[4, 11, 12], [1, 14, 18], [13, 9, 10]]],
    ),
    (
        Plan(CHUNKED, WindowShuffle(2), batch_size=3, seed=42, lanes=4, tail="short"),
        [[[1, 14, 18], [13, 9, 10], [0, 16, 19], [7]], [[2, 8, 5], [3, 15, 17], [4, 11, 12], [6]]],
    ),
    (
        Plan(CHUNKED, WindowShuffle(2), batch_size=3, seed=42, lanes=4, tail="pad"),
        [[[1, 14, 18], [13, 9, 10], [0, 16, 19], [7, 6]], [[2, 8, 5], [3, 15, 17], [4, 11, 12], []]],
    ),
    (
        Bucketed(CHUNKED, TOKENS, batch_size=3, seed=42, tail="drop"),
        [[[10, 4, 17], [14, 16, 18], [1, 11, 13]], [[7, 9, 3], [19, 12, 6], [8, 15, 0]]],
    ),
    (
        Bucketed(CHUNKED, TOKENS, batch_size=3, seed=42, tail="pad"),
        [[[10, 4, 17], [14, 16, 18], [1, 11, 13], [2, 5]], [[7, 9, 3], [19, 12, 6], [8, 15, 0], []]],
    ),
    (
        Segments(Plan(CHUNKED, Shuffle(), batch_size=3, seed=42, lanes=2, tail="drop"), length=6),
        [[[9, 4, 4], [16, 19, 9], [11, 2, 8]], [[13, 12, 10], [1, 17, 5], [14, 0, 7]]],
    ),
    (
        TokenBudget(CHUNKED, TOKENS, max_tokens=20, seed=42, tail="drop"),
        [[[17, 13], [6, 19, 9], [1]], [[12, 10], [11, 4], [18, 3, 7, 16]]],
    ),
    (
        TokenBudget(CHUNKED, TOKENS, max_tokens=20, seed=42, tail="pad"),
        [[[17, 13], [6, 19, 9], [1], [8, 5, 15, 14, 0, 2]], [[12, 10], [11, 4], [18, 3, 7, 16], []]],
    ),
    (
        Packed(CHUNKED, TOKENS, length=16, batch_size=1, seed=42, tail="drop"),
        [[[1, 15], [11, 19], [17, 10], [5]], [[3, 9, 7, 2], [18, 8, 0, 16, 14], [4, 12], [13, 6]]],
    ),
    (
        Packed(CHUNKED, TOKENS, length=16, batch_size=1, seed=42, tail="pad"),
        [[[1, 15], [11, 19], [17, 10], [5]], [[3, 9, 7, 2], [18, 8, 0, 16, 14], [4, 12], [13, 6]]],
    ),
    (
        WindowBatches(CHUNKED, PartitionChunks(6), seed=42),
        [[[17, 18, 19], [5, 6, 7, 8, 9, 10]], [[11, 12, 13, 14, 15, 16], [0, 1, 2, 3, 4]]],
    ),
    (
        Plan(CHUNKED, Mixed(MIXED, ((0, (3, 1)), (2, (1, 2))), 17), batch_size=3, seed=42, lanes=2, tail="drop"),
        [[[18, 19, 10], [16, 11, 3]], [[13, 15, 10], [17, 14, 9]]],
    ),
    (
        Plan(CHUNKED, Mixed(MIXED, ((0, (3, 1)),), homogeneous=True), batch_size=3, seed=42, tail="drop"),
        [[[10, 9, 10], [5, 9, 4]], [[3, 8, 1], [19, 14, 17]]],
    ),
    (
        Plan(CHUNKED, Balanced(LABELS, length=20), batch_size=3, seed=42, tail="pad"),
        [[[1, 1, 0], [0, 13, 16], [0, 9, 19], [2, 2]], [[10, 8, 14], [17, 0, 1], [2, 7, 4], []]],
    ),
    (
        Plan(CHUNKED, BalancedSpans((0, 5), (0.25, 0.75), length=12), batch_size=3, seed=42, tail="drop"),
        [[[17, 18, 15], [1, 7, 10]], [[5, 11, 13], [0, 2, 16]]],
    ),
    (
        Plan(CHUNKED, Subset(12, near=3, window=2), batch_size=2, seed=42, tail="drop"),
        [[[7, 8], [5, 16], [2, 4]], [[13, 18], [12, 3], [9, 10]]],
    ),
    (
        Plan(CHUNKED, Listed([3, 1, 3, 19, 0, 7, 7, 2]), batch_size=2, seed=42, tail="drop"),
        [[[3, 1], [0, 7]], [[3, 19], [7, 2]]],
    ),
    (
        Plan(CHUNKED, RandomChunks(4, count=4), batch_size=4, seed=42, tail="drop"),
        [[[14, 15, 16, 17], [7, 8, 9, 10]], [[2, 3, 4, 5], [3, 4, 5, 6]]],
    ),
    (
        Plan(CHUNKED.select(range(0, 20, 2)), WindowShuffle(3), batch_size=2, seed=42, tail="short"),
        [[[6, 10], [8, 18], [4]], [[16, 2], [0, 14], [12]]],
    ),
    (
        Plan(CHUNKED, WindowShuffle(2, held=False), batch_size=4, seed=42, lanes=2, tail="drop"),
        [[[19, 2, 8, 5], [4, 11, 12, 13]], [[3, 15, 17, 1], [14, 18, 0, 16]]],
    ),
]


@pytest.mark.parametrize(("plan", "batches", "order_hash"), ORDERS)
def test_a_short_order_is_what_it_was(plan: Plan, batches: list[list[int]], order_hash: str) -> None:
    epoch = plan.epoch(1)
    assert [draw.items.tolist() for draw in epoch.draws(range(epoch.n_batches))] == batches
    assert plan.order_hash(1) == order_hash


@pytest.mark.parametrize(("plan", "hash_0", "hash_7", "head"), LONG_ORDERS)
def test_a_long_order_is_what_it_was(plan: Plan, hash_0: str, hash_7: str, head: list[int]) -> None:
    assert plan.epoch(7).draw(3).items[:6].tolist() == head
    assert (plan.order_hash(0), plan.order_hash(7)) == (hash_0, hash_7)


def real_items(draw: Draw) -> list[int]:
    return (draw.items if draw.mask is None else draw.items[draw.mask]).tolist()


@pytest.mark.parametrize(("plan", "made"), RANKS)
def test_the_batches_of_two_ranks_are_what_they_were(plan: Plan, made: list[list[list[int]]]) -> None:
    epoch = plan.epoch(1)
    real = [[real_items(draw) for draw in epoch.share(World(rank, 2)).draws()] for rank in range(2)]
    assert real == made
    if plan.tail != "short":  # the last round of a short tail is split once more
        together = [batch for step in zip(*real, strict=True) for batch in step if batch]
        assert together == [real_items(draw) for draw in epoch.draws(range(len(together)))]


@pytest.mark.parametrize(
    ("plan", "numbers", "begins", "counts"),
    [
        (
            Packed(CHUNKED, TOKENS, length=8, batch_size=3, seed=42, too_long="truncate", tail="drop"),
            [0, 1, 2, 2],
            [0] * 4,
            [8, 8, 5, 3],
        ),
        (
            Packed(CHUNKED, TOKENS, length=16, batch_size=2, seed=42),
            [0, 0, 1, 1, 1, 1, 1],
            [0] * 7,
            [9, 6, 4, 3, 3, 3, 3],
        ),
        (
            Packed(CHUNKED, TOKENS, length=16, batch_size=2, seed=42, split=True),
            [0, 0, 1, 1, 1],
            [0, 0, 1, 0, 0],
            [9, 7, 4, 6, 6],
        ),
    ],
)
def test_how_much_of_each_item_is_delivered_is_what_it_was(
    plan: Plan, numbers: list[int], begins: list[int], counts: list[int]
) -> None:
    rows = plan.epoch(1).draw(1).rows
    assert rows is not None
    assert (rows.numbers.tolist(), rows.begins.tolist(), rows.counts.tolist()) == (numbers, begins, counts)


def test_a_draw_out_of_a_billion_items_is_what_it_was() -> None:
    plan = Plan(Index.uniform(10**9), Shuffle(), batch_size=4, seed=42, tail="drop")
    assert plan.epoch(0).draw(0).items.tolist() == [32754199, 694307766, 51806702, 387737624]
    assert plan.epoch(3).draw(10**9 // 4 - 1).items.tolist() == [230465422, 62373259, 308801952, 900490384]


def test_permutations_are_what_they_were() -> None:
    assert permute(np.arange(12), 12, 7).tolist() == [11, 1, 6, 7, 5, 0, 4, 9, 8, 2, 10, 3]
    # Up to 256 items take 24 rounds, more take 8.
    assert permute(np.arange(4), 256, 7).tolist() == [24, 60, 19, 130]
    assert permute(np.arange(4), 257, 7).tolist() == [194, 128, 212, 88]
    assert permute(np.arange(8), 10**6, 7).tolist() == [752533, 473598, 949456, 290002, 520104, 30087, 801898, 730409]


def test_visits_and_epochs_that_seed_augmentation_are_what_they_were() -> None:
    balanced = Plan(CHUNKED, Balanced(LABELS, length=20), batch_size=10, seed=42, tail="drop").epoch(1).draw(0)
    assert balanced.visits.tolist() == [2, 0, 2, 0, 0, 0, 1, 0, 0, 0]
    across = Segments(Plan(CHUNKED, Shuffle(), batch_size=6, seed=42, tail="drop"), length=4).epoch(0).draw(3)
    assert [across.seed_path(row) for row in range(6)] == [(0, 9), (0, 4), (1, 4), (1, 16), (1, 19), (1, 9)]


def test_keys_and_generators_are_what_they_were() -> None:
    assert key_for(0) == 7502309754105200649
    assert key_for(42, "shuffle", 3) == 2573718761452544961
    assert key_for(42, "shuffle", "3") == 9330027492493518228
    assert key_for(2**70, "größe") == 8364437968915077500
    assert subkeys(5, np.arange(3)).tolist() == [7134611160154358618, 13877614986023876344, 4292726422858613063]
    assert mix64(np.array([1, 2**63], np.uint64)).tolist() == [6238072747940578789, 2720858781877447050]
    # Raw bits, and the one conversion that numpy has not changed since Generator exists.
    assert generator_for(42, "augment", 0, 12).bit_generator.random_raw(2).tolist() == [
        9357451974636614607,
        14850842264621658624,
    ]
    assert generator_for(42, "augment", 0, 12).random() == 0.5072684879914895


def test_identities_are_what_they_were() -> None:
    assert Plan(LARGE, WindowShuffle(8), batch_size=64, seed=42, lanes=4, tail="pad").identity() == {
        "items": 1000,
        "data": "8293ac00800ac300",
        "order": "WindowShuffle(window=8)",
        "seed": 42,
        "batch_size": 64,
        "lanes": 4,
        "tail": "pad",
        "segment": 0,
    }
    assert CHUNKED.select(range(0, 20, 2)).digest == "82ff45c97723d800"
    assert Index.concat([CHUNKED, Index.uniform(5, identity="x")]).digest == "8c698cc96103d40a"
    assert repr(Balanced(LABELS, length=20)) == "Balanced(2 groups of 20 items, length=20, 74b0644c72fbfdee)"
    assert repr(Listed([3, 1, 3])) == "Listed(3 items, 3c1410ea83178c60)"
    assert repr(Subset(8, near=3, window=2)) == "Subset(count=8, near=3, window=2)"
    assert repr(BalancedSpans((0, 5), (0.25, 0.75), 8)) == (
        "BalancedSpans(starts=(0, 5), weights=(0.25, 0.75), length=8)"
    )
    assert repr(Mixed(MIXED, ((0, (3, 2)),))) == "Mixed(a 3/5, b 2/5, stop='first', 301c4754831b2dc8)"
    assert repr(RandomChunks(4)) == "RandomChunks(size=4, count=None, align=1, shuffle=False)"
