"""Decide what the recordings of a dataset have in common: their fields, units and columns.

1. A field that some recordings lack: left out of all (`missing="skip"`), or filled in (`missing="allow"`).
2. Units or columns that differ: SourceError with a table (`units="refuse"`), those that all have ("intersect"), or all
   that any has ("pad").
3. The same units in another order: put in the order of the first recording.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.convert.nwb.complete import Common, Member
from penstock.convert.nwb.options import NWBOptions
from penstock.convert.plan import Alignment, Scan
from penstock.core.errors import SourceError

__all__ = ["agree"]

_LINES = 14  # of a table in an error
_NAMES = 3  # files that are named in a line

Labels = tuple[Any, ...]
"""Unit ids, or the names of columns."""


def agree(scans: Sequence[Scan], options: NWBOptions) -> Alignment:
    """Return the scans with inputs that read the same fields, units and columns, and what was done."""
    lacking = {name: [scan for scan in scans if name not in scan.about["fields"]] for name in options.all_fields}
    lacking = {name: some for name, some in lacking.items() if some}
    if options.missing == "skip" and lacking:
        found = _leave_out(scans, options, lacking)
        if found.stale:
            return found
        # Nobody has the fields that are left out: the scans are as they would be without them.
        reduced: Any = found.scans[0].input
        rest = agree(found.scans, reduced.options)
        return replace(rest, notes=(*found.notes, *rest.notes))
    done = _Agreement(options, lacking)
    labels = {"spikes": [_unit_ids(scan) for scan in scans]}
    labels |= {name: [_columns(scan, name) for scan in scans] for name in options.all_fields if name != "spikes"}
    different = {name: each for name, each in labels.items() if len({one for one in each if one is not None}) > 1}
    if options.units == "refuse" and any(len(set(map(_as_set, each)) - {None}) > 1 for each in different.values()):
        raise SourceError(_describe_differences(scans, different))
    for name, each in different.items():
        done.align(name, [one for one in each if one is not None])
    done.note_subjects(scans)
    done.note_shapes(scans, {name for name in options.all_fields if name not in different})
    return done.apply(scans)


@dataclass(slots=True)
class _Agreement:
    """What has been decided so far."""

    options: NWBOptions
    lacking: Mapping[str, Sequence[Scan]]
    common: dict[str, Labels] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def align(self, name: str, each: Sequence[Labels]) -> None:
        """Decide the units of spikes, or the columns of another field."""
        word = "unit" if name == "spikes" else "column"
        how = self.options.units if len(set(map(_as_set, each))) > 1 else "reorder"
        if how != "reorder" and any(len(set(one)) < len(one) for one in each):
            raise SourceError(f"The {word}s of {name} must have different ids to be aligned, but some are repeated.")
        kept = set(each[0]).intersection(*each[1:]) if how == "intersect" else set().union(*each)
        if not kept:
            raise SourceError(
                f"No {word} of {name} is in all recordings, so that units='intersect' would leave none. Use "
                "units='pad'."
            )
        ordered = [label for label in dict.fromkeys(label for one in each for label in one) if label in kept]
        labels = tuple(sorted(ordered) if name == "spikes" and how != "reorder" else ordered)
        self.common[name] = labels
        sizes = [len(one) for one in each]
        have = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{max(sizes)}"
        by = "id" if name == "spikes" else "name"
        text = {
            "reorder": f"the same {word}s in all recordings, put in one order.",
            "intersect": f"the {len(labels)} that all recordings have; each has {have}.",
            "pad": f"the {len(labels)} that any recording has; each has {have}, and the rest is filled in.",
        }[how]
        self.notes.append(f"{word.capitalize()}s of {name} are matched by {by}: {text}")

    def note_subjects(self, scans: Sequence[Scan]) -> None:
        """Note that units of several subjects share a column, because they have the same id."""
        ids: dict[str, set[Any]] = {}
        for scan in scans:
            if "subject" in scan.groups:
                ids.setdefault(scan.groups["subject"], set()).update(_unit_ids(scan) or ())
        if sum(map(len, ids.values())) > len(set().union(*ids.values())):
            self.notes.append(
                f"Units of {len(ids)} subjects have the same ids, and share a column: an id is another neuron in each."
            )

    def note_shapes(self, scans: Sequence[Scan], names: Iterable[str]) -> None:
        """Note fields whose shape differs between recordings."""
        for name in sorted(names):
            shapes = Counter(scan.shapes[name] for scan in scans if name in scan.shapes)
            if len(shapes) > 1:
                said = ", ".join(
                    f"{' × '.join(map(str, shape)) or 'one value'} in {_count(n, 'recording')}"
                    for shape, n in shapes.most_common(4)
                )
                self.notes.append(f"Shapes of {name} differ: {said}. Batches of it are lists, unless they are padded.")

    def apply(self, scans: Sequence[Scan]) -> Alignment:
        """Return the scans with inputs that know what they have in common."""
        absent = self._absent_members(scans)
        for name in self.lacking:
            files = _name_files(self.lacking[name])
            if name in absent:
                self.notes.append(f"{name} is filled in, and has_{name} is False, in the items of {files}.")
        columns = tuple((name, labels) for name, labels in self.common.items() if name != "spikes")
        masked = {"spikes_valid" in scan.fields for scan in scans if "spikes" in scan.about["fields"]}
        common = Common(self.common.get("spikes"), columns, tuple(absent.items()), len(masked) > 1)
        how = self.options.units
        about = {
            name: {"how": how, "unit_ids" if name == "spikes" else "columns": list(labels)}
            for name, labels in self.common.items()
        }
        if common == Common():
            return Alignment(tuple(scans), notes=tuple(self.notes))
        found = [self._conform(scan, common) for scan in scans]
        return Alignment(tuple(found), notes=tuple(self.notes), about=about)

    def _conform(self, scan: Scan, common: Common) -> Scan:
        fields = dict(scan.fields)
        for name, members in common.absent:
            if name not in scan.about["fields"]:
                fields |= {member: dtype for member, dtype, _ in members} | {f"has_{name}": "bool"}
        if common.masks_spikes and "spikes" in fields:
            fields["spikes_valid"] = "bool"
        given: Any = scan.input
        return replace(scan, input=replace(given, common=common), fields=fields)

    def _absent_members(self, scans: Sequence[Scan]) -> dict[str, tuple[Member, ...]]:
        """Return the members of fields that some recordings lack and others have."""
        found = {}
        for name in self.lacking:
            having = [scan for scan in scans if name in scan.about["fields"]]
            if not having:
                continue
            scan = next((scan for scan in having if f"{name}_valid" in scan.fields), having[0])
            members = []
            for member in (name, f"{name}_valid"):
                if member not in scan.fields:
                    continue
                shape = scan.shapes[member]
                if name in self.common:
                    shape = (*shape[:-1], len(self.common[name]))
                members.append((member, scan.fields[member], shape))
            found[name] = tuple(members)
        return found


def _leave_out(scans: Sequence[Scan], options: NWBOptions, lacking: Mapping[str, Sequence[Scan]]) -> Alignment:
    """Return scans that are to be repeated without the fields that some recordings lack."""
    kept = [name for name in options.all_fields if name not in lacking]
    if not kept:
        raise SourceError(_describe_lacks(scans, lacking))
    found, stale = [], []
    for number, scan in enumerate(scans):
        given: Any = scan.input
        found.append(replace(scan, input=replace(given, options=_reduce(given.options, kept))))
        if any(name in scan.about["fields"] for name in lacking):
            stale.append(number)
    notes = [f"{name} is left out, because it is missing in {_name_files(some)}." for name, some in lacking.items()]
    return Alignment(tuple(found), stale=tuple(stale), notes=tuple(notes))


def _reduce(options: NWBOptions, kept: Sequence[str]) -> NWBOptions:
    modalities = tuple(what for what, name in options.field_names.items() if name in kept)
    fields = tuple((name, path) for name, path in options.paths.items() if name in kept)
    return replace(options, modalities=modalities, fields=fields)


def _unit_ids(scan: Scan) -> Labels | None:
    found = scan.about["fields"].get("spikes", {}).get("unit_ids")
    return None if found is None else tuple(found)


def _columns(scan: Scan, name: str) -> Labels | None:
    found = scan.about["fields"].get(name, {}).get("columns")
    return None if found is None else tuple(found)


def _as_set(labels: Labels | None) -> frozenset[Any] | None:
    return None if labels is None else frozenset(labels)


def _describe_differences(scans: Sequence[Scan], different: Mapping[str, Sequence[Labels | None]]) -> str:
    """Return the error of recordings with unlike units or columns: one line for each group of equal recordings."""
    everywhere = {
        name: frozenset.intersection(*(frozenset(one) for one in each if one is not None))
        for name, each in different.items()
    }

    def describe(number: int) -> str:
        return "; ".join(
            f"{name}: {_describe_labels(name, each[number], everywhere[name])}" for name, each in different.items()
        )

    return (
        f"The recordings of a dataset must have the same units and columns, but these differ:\n"
        f"{_make_table(scans, describe)}\n"
        "Use units='intersect' to keep what all have, or units='pad' to fill in what some lack. "
        "Units are matched by id, columns by name."
    )


def _describe_lacks(scans: Sequence[Scan], lacking: Mapping[str, Sequence[Scan]]) -> str:
    def describe(number: int) -> str:
        return f"no {', '.join(name for name, some in lacking.items() if scans[number] in some)}"

    return (
        f"The recordings of a dataset must have at least one field in common, but none is in all of them:\n"
        f"{_make_table(scans, describe)}\n"
        "Use missing='allow' to fill in what a recording lacks."
    )


def _make_table(scans: Sequence[Scan], describe: Callable[[int], str]) -> str:
    groups: dict[str, list[Scan]] = {}
    for number, scan in enumerate(scans):
        groups.setdefault(describe(number), []).append(scan)
    lines = [f"  {_name_files(some)}: {text}" for text, some in groups.items()]
    if len(lines) > _LINES:
        rest = sum(len(some) for some in list(groups.values())[_LINES:])
        lines = [*lines[:_LINES], f"  … and {_count(rest, 'recording')} that differ from these."]
    return "\n".join(lines)


def _describe_labels(name: str, labels: Labels | None, everywhere: frozenset[Any]) -> str:
    if labels is None:
        return "none"
    word = "unit" if name == "spikes" else "column"
    extra = [label for label in labels if label not in everywhere]
    shown = _shorten([str(label) for label in extra])
    return _count(len(labels), word) + (f", {len(extra)} of them not in all ({shown})" if extra else "")


def _shorten(texts: Sequence[str]) -> str:
    return ", ".join(texts) if len(texts) <= _NAMES else f"{', '.join(texts[:_NAMES])}, …"


def _name_files(scans: Sequence[Scan]) -> str:
    names = _shorten([scan.name for scan in scans])
    return names if len(scans) == 1 else f"{_count(len(scans), 'recording')} ({names})"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"
