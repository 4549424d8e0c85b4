"""The shuffle section of a report: how well the order mixes, and which item comes when."""

from typing import Any

import numpy as np

from penstock.core.text import count
from penstock.observe.durations import Floats
from penstock.report.page.html import Html, join, tag
from penstock.report.page.layout import figure
from penstock.report.page.svg import Axis, Chart, Points

__all__ = ["describe_mixing", "shuffle_section"]

_ROWS = 24
_WELL, _SOME = 0.8, 0.3
_CLUSTERED = 2.0


def shuffle_section(shuffle: dict[str, Any] | None, *, watched: bool) -> Html:
    """Return the mixing in words and the access map; if there is no plan, why."""
    if shuffle is None or "mixing" not in shuffle:
        why = "" if shuffle is None else str(shuffle.get("unknown", ""))
        if watched and not why:
            why = (
                "The loader of this run has no plan, so that its order is unknown. Penstock loaders have one; for a "
                "torch DataLoader, add --dataset to see what a shuffle would do."
            )
        return tag("p", f"There is no order to show. {why}".strip())
    mixing = shuffle["mixing"]
    whose = "The order of this run" if "of" not in shuffle else f"The order of {shuffle['of']}"
    explanation = (
        "The mixing score compares the positions of a batch's items in storage with two extremes. 0: a batch is a run "
        "of neighbours. 1: its items are as spread out as independent random samples. Neighbours in storage are often "
        "alike (one recording, one subject), and batches of similar items make training noisy."
    )
    cost = mixing["read_amplification"]
    costs = (
        f"If only whole chunks can be read, this order reads {cost:.2f} times the items that it delivers, measured "
        f"over {count(mixing['batches_measured'], 'batch')} of epoch 0. In uncompressed shards, any item is cheap to "
        "read."
    )
    if "padding" in mixing:
        costs += f" {mixing['padding']:.1%} of the tokens in its batches are padding."
    return join(
        tag("p", f"{whose}: {shuffle['description']}."),
        tag("p", describe_mixing(shuffle)[1], " ", explanation),
        _access_chart(shuffle),
        tag("p", costs, class_="soft"),
    )


def describe_mixing(shuffle: dict[str, Any]) -> tuple[str, str]:
    """Return the kind of note (`"good"` or `""`) and a sentence about how well an order mixes."""
    score = float(shuffle["mixing"]["score"])
    if score >= _WELL:
        return "good", f"The shuffle mixes well: score {score:.2f} (1: uniform, 0: storage order)."
    if score >= _SOME:
        return "", f"The shuffle mixes partly: score {score:.2f} (1: uniform, 0: storage order)."
    if score < 0.02:
        return "", "Items come in storage order (mixing score 0.00): right for validation, rarely for training."
    return "", f"The shuffle mixes little: score {score:.2f} (1: uniform, 0: storage order)."


def _access_chart(shuffle: dict[str, Any]) -> Html:
    access, batch_size = shuffle["access"], max(1, shuffle["batch_size"])
    positions = np.asarray(access["positions"], np.float64)
    items = np.asarray(access["items"], np.float64)
    borders = access["borders"]
    lines = (
        f"Dotted lines are the borders of the {access['n_parts']:,} {access['borders_of']}."
        if borders
        else f"The {access['n_parts']:,} {access['borders_of']} are too many to show their borders."
        if borders is None
        else f"All items are in one {access['borders_of'].removesuffix('s')}."
    )
    some = (
        "" if len(items) >= access["n_positions"] else f" {len(items):,} of {access['n_positions']:,} items are shown."
    )
    cloud = _describe_cloud(positions, items, access["n_items"])
    chart = Chart(
        title="Access map: which item comes when",
        finding=f"Each point is an item of epoch 0. {cloud} {lines}{some}",
        x=Axis("batch", 0, max(1.0, access["n_positions"] / batch_size)),
        y=Axis("item number in storage", 0, max(1.0, float(access["n_items"]))),
        content=(Points("items", positions / batch_size, items),),
        borders=tuple(float(border) for border in borders or ()),
    )
    every = max(1, -(-len(items) // _ROWS))
    rows = [
        [f"{position:,.0f}", f"{position // batch_size:,.0f}", f"{item:,.0f}"]
        for position, item in zip(positions[::every], items[::every], strict=True)
    ]
    return figure("chart-access", chart, ["position", "batch", "item"], rows, taller=100)


def _describe_cloud(positions: Floats, items: Floats, n_items: int) -> str:
    """Return a sentence about the cloud of points: a line, evenly filled, or clusters."""
    if len(items) < 3 or n_items < 3:
        return ""
    if np.array_equal(items, np.sort(items)):
        return "The points lie on a rising line: storage order."
    # Counts in the cells of a grid: for a uniform order, their variance is no more than their mean.
    cells = max(2, min(10, int(np.sqrt(len(items) / 6))))
    counts, _, _ = np.histogram2d(positions, items, bins=cells, range=[[0, positions.max() + 1], [0, n_items]])
    if counts.var() <= _CLUSTERED * counts.mean():
        return "The points fill the map evenly: at any time, items come from all over the storage."
    return "The points lie in clusters: parts of the storage are visited together, as in a shuffle within windows."
