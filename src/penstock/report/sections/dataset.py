"""The dataset section of a report: fields, shards, splits, and some items."""

from collections.abc import Sequence
from typing import Any

from penstock.core.text import count
from penstock.observe.advice import format_bytes
from penstock.report.content import ItemPicture
from penstock.report.page.html import Html, join, tag
from penstock.report.page.layout import figure, picture, table
from penstock.report.page.svg import Axis, Bars, Chart

__all__ = ["dataset_section"]

_MOST_NAMED = 6  # groups of a split listed by name


def dataset_section(data: dict[str, Any], pictures: Sequence[ItemPicture], no_pictures: str) -> Html:
    """Return the section about a dataset."""
    low, high = data["items_per_shard"]
    each = f"{count(low, 'item')} each" if low == high else f"{low:,} to {high:,} items each"
    packed = "not compressed" if data["compression"] == "none" else f"compressed with {data['compression']}"
    inputs = f" Converted from {count(data['inputs'], 'input')}." if data["inputs"] else ""
    shards = f"{count(data['shards'], 'shard')} of {each}"
    return join(
        tag("p", f"{shards}, {format_bytes(data['bytes'])}, {packed}.{inputs}"),
        tag("h3", "Fields"),
        _fields(data),
        _bytes(data),
        _splits(data),
        _metadata(data["metadata"]),
        tag("h3", "Example items"),
        *_items(pictures, no_pictures),
    )


def _fields(data: dict[str, Any]) -> Html:
    rows = [
        [
            entry["name"],
            entry["dtype"] or entry["stored_as"],
            "varies" if entry["shape"] is None else _shape(entry["shape"]) if entry["dtype"] else "–",
            "varies" if entry["item_bytes"] is None else format_bytes(entry["item_bytes"]),
            f".{entry['stored_as']}",
        ]
        for entry in data["fields"]
    ]
    return table("Fields", ["field", "type", "shape per item", "size per item", "stored as"], rows)


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(f"{length:,}" for length in shape) if shape else "one value"


def _bytes(data: dict[str, Any]) -> Html | None:
    known = [entry for entry in data["fields"] if entry["item_bytes"]]
    if len(known) < 2:
        return None
    total = sum(entry["item_bytes"] for entry in known)
    known.sort(key=lambda entry: -entry["item_bytes"])
    largest = known[0]
    chart = Chart(
        title="Bytes per field",
        finding=f"{largest['name']} takes {100 * largest['item_bytes'] / total:.0f} % of the {format_bytes(total)} "
        "of an item, counting fields of fixed shape. To load fewer fields, pass fields=[...].",
        x=Axis("", 0, 1),
        y=Axis("", 0, 1),
        content=(
            Bars(
                tuple(entry["name"] for entry in known),
                tuple(format_bytes(entry["item_bytes"]) for entry in known),
                tuple(float(entry["item_bytes"]) for entry in known),
            ),
        ),
    )
    rows = [[entry["name"], f"{entry['item_bytes']:,}"] for entry in known]
    return figure("chart-bytes", chart, ["field", "bytes"], rows)


def _splits(data: dict[str, Any]) -> Html | None:
    if not data["splits"]:
        groups = [[name, f"{count:,}"] for name, count in data["groups"].items()]
        return join(tag("h3", "Subjects"), table("Subjects", ["subject", "items"], groups)) if groups else None
    kind = data["group_by"]
    rows = [
        [
            entry["name"] + (" (this dataset)" if entry["name"] == data["split"] else ""),
            f"{entry['items']:,}",
            f"{entry['shards']:,}",
            format_bytes(entry["bytes"]),
            _join_groups(entry["groups"]),
        ]
        for entry in data["splits"]
    ]
    rule = (
        "Each recording is cut into time ranges; windows across a border are left out."
        if kind == "time"
        else f"No {kind} is in more than one split."
    )
    return join(
        tag("h3", "Splits"),
        tag("p", rule),
        table(
            "Splits", ["split", "items", "shards", "size", "files" if kind == "time" else f"{kind}s"], rows, long=(4,)
        ),
    )


def _join_groups(groups: Sequence[str]) -> str:
    more = f" and {len(groups) - _MOST_NAMED} more" if len(groups) > _MOST_NAMED else ""
    return ", ".join(groups[:_MOST_NAMED]) + more


def _metadata(metadata: dict[str, str]) -> Html | None:
    if not metadata:
        return None
    rows = [[name, value] for name, value in metadata.items()]
    return join(tag("h3", "Metadata"), table("Metadata", ["name", "value"], rows, long=(1,)))


def _items(pictures: Sequence[ItemPicture], no_pictures: str) -> list[Html]:
    if not pictures:
        return [tag("p", no_pictures or "There are no items to plot.")]
    first, *others = pictures
    return [
        tag("figure", tag("figcaption", tag("b", f"Item {first.item:,}")), picture(first)),
        *(tag("details", tag("summary", f"Item {entry.item:,}"), picture(entry), class_="item") for entry in others),
    ]
