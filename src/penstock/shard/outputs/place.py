"""Where a dataset is written, a folder or a URL, and the steps of its publication.

1. `lock`, then `finish` what an earlier writer had prepared, or `clear` what it left unfinished.
2. `begin` with the options of the write. From here on, a writer with the same options can resume.
3. Shards are written through `shards`, by any process. Each is there whole, or not at all.
4. `prepare` the manifest: all shards are stored, and only the commit is left.
5. `finish`: the manifest is put at its place, the only commit point.

A reader finds the previous dataset, none, or the new one, never a mixture, however and whenever a writer is killed.
"""

from pathlib import Path

from penstock.core.errors import OptionError
from penstock.files.locks import FolderLock
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url
from penstock.shard.outputs.local import LocalPlace, LocalShards
from penstock.shard.outputs.remote import RemotePlace, Turn
from penstock.shard.outputs.uploads import RemoteShards

__all__ = ["Lock", "Place", "ShardFolder", "open_place"]

Place = LocalPlace | RemotePlace
"""A folder or a URL at which a dataset is written."""

ShardFolder = LocalShards | RemoteShards
"""Where the shards of one write go; picklable, so that each process writes its own."""

Lock = FolderLock | Turn
"""A lock on a place, against other writers."""


def open_place(where: Path | Url, store: StoreOptions | None = None) -> Place:
    """Return the place of a dataset that is written to a folder or to a URL."""
    if isinstance(where, Url):
        if where.is_http:
            raise OptionError(
                f"A dataset must be written to a folder or a bucket, such as s3://bucket/train, got the web address "
                f"{where}."
            )
        return RemotePlace(where, store)
    if store is not None:
        raise OptionError(f"store needs a URL to write to, such as s3://bucket/train, got the folder {where}.")
    return LocalPlace(where)
