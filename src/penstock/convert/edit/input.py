"""Shards as an input whose fields are dropped or renamed."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.convert.inputs.protocol import Sample
from penstock.convert.inputs.shards import OpenShards
from penstock.files.spans.options import RemoteOptions
from penstock.files.stores.url import Url
from penstock.shard.manifest import METADATA

__all__ = ["EditedShards"]


@dataclass(frozen=True, slots=True)
class EditedShards:
    """A folder or URL of shards, with some of their fields under other names. Every byte is verified as it is read.

    Parameters
    ----------
    fields
        Old and new names of the fields that are read.
    has_metadata
        Whether items have metadata, which are always kept.
    """

    path: Path | Url
    fields: tuple[tuple[str, str], ...]
    has_metadata: bool = True
    remote: RemoteOptions | None = field(default=None, repr=False, compare=False)  # does not change what is read

    is_folder: ClassVar[bool] = True

    def open(self) -> "_EditedRecording":
        """Open the shards."""
        return _EditedRecording(self)


class _EditedRecording(OpenShards):
    def __init__(self, given: EditedShards) -> None:
        names = [name for name, _ in given.fields]
        super().__init__(given.path, given.remote, [*names, *([METADATA] if given.has_metadata else [])])
        self._renamed = dict(given.fields)
        self.about = {**self.about, **_list_origin(self.manifest.fingerprint, self.manifest.metadata)}

    def samples(self, numbers: NDArray[np.int64]) -> Iterator[Sample]:
        """Yield items in the order of `numbers`."""
        for sample, metadata in super().samples(numbers):
            yield {new: sample[old] for old, new in self._renamed.items()}, metadata


def _list_origin(fingerprint: str, metadata: Any) -> dict[str, Any]:
    """Return where a dataset came from, for the manifest of the one that is made of it."""
    conversion = metadata.get("conversion")
    return {"fingerprint": fingerprint, **({} if conversion is None else {"conversion": conversion})}
