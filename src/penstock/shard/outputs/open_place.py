"""Choose how a dataset is written, by where."""

from pathlib import Path

from penstock.core.errors import OptionError
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url
from penstock.shard.outputs.local import LocalPlace
from penstock.shard.outputs.place import Place
from penstock.shard.outputs.remote import RemotePlace

__all__ = ["open_place"]


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
