"""What is changed in a dataset: which items are kept, in which order and parts, and with which fields."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.convert.edit.derive import name_function
from penstock.core.checks import check_integer
from penstock.core.errors import OptionError
from penstock.core.seeds import check_seed
from penstock.core.text import did_you_mean
from penstock.shard.manifest import METADATA
from penstock.shard.names import check_fields, stored_extension
from penstock.source.select.expression import parse_condition
from penstock.source.select.parts import check_fractions

__all__ = ["Edits"]

_NOT_IN_SIDECAR = ("where", "drop_fields", "rename", "sort_by", "split", "shard_size", "shard_bytes")
_DECODED = ("bin", "txt", "json")  # all other extensions are those of files, which are copied as they are


@dataclass(frozen=True, slots=True)
class Edits:
    """What is changed in a dataset. Columns and fields are named as in the dataset that is read.

    Parameters
    ----------
    where
        Keep the items that fulfil a condition over metadata columns, such as `"subject == 'A' and quality > 0.5"`.
    drop_fields
        Fields to leave out.
    rename
        Old to new names of fields.
    sort_by
        Write items in ascending order of a column; items with the same value stay in their order.
    split
        Write one dataset for each name, with this fraction of the items: `{"train": 0.8, "val": 0.2}`. The parts are
        those of `source.split`.
    split_by
        With `split`: items with the same value of this column are in the same part; None: items are divided one by one.
    seed
        With `split`: the seed of the random division.
    add_fields
        Name of a field to `"module:function"`, or the function, which takes a dict of the fields of an item, decoded,
        and returns the field. What is written is a sidecar: a dataset with these fields alone, and the same items.
    copy
        With `add_fields`: write the other fields of the items as well.
    shard_size, shard_bytes
        Items per shard, or about how many bytes a shard has; both None: as many items as in the dataset that is read.
    """

    where: str | None = None
    drop_fields: Sequence[str] = ()
    rename: Mapping[str, str] | None = None
    sort_by: str | None = None
    split: Mapping[str, float] | None = None
    split_by: str | None = None
    seed: int = 0
    shard_size: int | None = None
    shard_bytes: int | None = None
    add_fields: Mapping[str, str | Callable[..., Any]] | None = None
    copy: bool = False

    def __post_init__(self) -> None:
        if self.where is not None:
            parse_condition(self.where)
        if isinstance(self.drop_fields, str):
            raise OptionError(f"drop_fields must be a list of names, got {self.drop_fields!r}.")
        if self.split is not None:
            check_fractions(self.split)
        elif self.split_by is not None:
            raise OptionError(
                f"split_by needs a split, got split_by={self.split_by!r} without one. Give split=... too."
            )
        check_seed(self.seed)
        for name in ("shard_size", "shard_bytes"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), at_least=1)
        if self.shard_size is not None and self.shard_bytes is not None:
            raise OptionError(
                f"At most one of shard_size and shard_bytes must be given, got {self.shard_size} and "
                f"{self.shard_bytes}."
            )
        check_fields((self.rename or {}).values(), METADATA)
        check_fields(self.add_fields or (), METADATA)
        added = tuple((name, name_function(function)) for name, function in (self.add_fields or {}).items())
        object.__setattr__(self, "add_fields", dict(added))
        if self.copy and not added:
            raise OptionError("copy needs add_fields; without them, all fields are written anyway. Leave it out.")
        others = [name for name in _NOT_IN_SIDECAR if getattr(self, name)]
        if self.is_sidecar and others:
            raise OptionError(
                f"{others[0]} needs copy=True together with add_fields: a sidecar has the items of the dataset, in "
                "their order."
            )
        for old, new in (self.rename or {}).items():
            extension = stored_extension(old)
            if extension not in _DECODED and stored_extension(new) != extension:
                raise OptionError(
                    f"The field {old!r} holds files, and must keep their extension to be read, such as "
                    f"{new.partition('.')[0]}.{extension}; got rename {old!r} to {new!r}."
                )

    @property
    def is_sidecar(self) -> bool:
        """Whether only added fields are written."""
        return bool(self.add_fields) and not self.copy

    @property
    def names(self) -> dict[str, str]:
        """Old to new names of fields."""
        return dict(self.rename or {})

    def check_fields(self, datasets: Sequence[Sequence[str]]) -> None:
        """Raise OptionError unless each field to drop or rename is in one of the datasets, given by their fields."""
        known = [name for name in dict.fromkeys(name for fields in datasets for name in fields) if name != METADATA]
        for what, names in (("drop", self.drop_fields), ("rename", self.names)):
            for name in names:
                if name not in known:
                    raise OptionError(_describe_unknown(what, name, known))
        both = [name for name in self.drop_fields if name in self.names]
        if both:
            raise OptionError(f"A field must be dropped or renamed, got both for {both[0]!r}.")
        for fields in datasets:
            kept = list(dict.fromkeys(fields) if self.is_sidecar else self.list_kept(fields).values())
            taken = next((name for name in self.add_fields or () if name in kept), None)
            if taken is not None:
                raise OptionError(f"A field to add must have a name of its own, but the items have {taken!r} already.")
            if not kept:
                raise OptionError(f"drop_fields must leave at least one field, but drops all of {', '.join(known)}.")
            double = next((name for name in kept if kept.count(name) > 1), None)
            if double is not None:
                raise OptionError(
                    f"rename must give every field a name of its own, but two would be {double!r}. Drop one, or use "
                    "another name."
                )
            check_fields([name for name in (*kept, *(self.add_fields or ())) if name != METADATA], METADATA)

    def list_kept(self, fields: Iterable[str]) -> dict[str, str]:
        """Return the fields of a dataset that are kept, besides metadata, with their new names."""
        return {
            name: self.names.get(name, name) for name in fields if name != METADATA and name not in self.drop_fields
        }

    def to_json(self) -> dict[str, Any]:
        """Return what is changed, for the manifest; only what is set."""
        division = {"split": dict(self.split), "split_by": self.split_by, "seed": self.seed} if self.split else {}
        found = {
            "where": self.where,
            "drop_fields": list(self.drop_fields) or None,
            "rename": self.names or None,
            "sort_by": self.sort_by,
            "add_fields": dict(self.add_fields or {}) or None,
            "copy": self.copy or None,
            **division,
            "shard_size": self.shard_size,
            "shard_bytes": self.shard_bytes,
        }
        return {name: value for name, value in found.items() if value is not None}


def _describe_unknown(what: str, name: str, known: Sequence[str]) -> str:
    hint = " Metadata stay with their items." if name == METADATA else did_you_mean(name, known)
    return f"The field to {what} must be one of {', '.join(map(repr, known))}, got {name!r}.{hint}"
