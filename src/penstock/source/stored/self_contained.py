"""Whether an HDF5 file is all in one file, and no part of it larger than what is stored of it allows.

A dataset may refer to any other file: by a link, as a virtual dataset, or as raw bytes of a file that is no HDF5 file,
such as a private key. Such files are not part of the identity of the data, and a pipe among them would block. So they
are refused.
"""

from pathlib import Path
from typing import Any

from penstock.core.errors import SourceError
from penstock.core.limits import check_expansion
from penstock.files.stores.url import Url

__all__ = ["check_dataset", "check_links", "check_read", "stored_bytes"]


def check_links(file: Any, path: Path | Url | str) -> None:
    """Raise SourceError if a link of an open `h5py.File` leads to another file. Nothing is opened that is linked."""
    import h5py  # type: ignore[import-untyped]  # noqa: PLC0415  # it has no types

    def find_external(name: bytes, info: Any) -> bytes | None:
        return name if info.type == h5py.h5l.TYPE_EXTERNAL else None

    found = file.id.links.visit(find_external, info=True)
    if found is not None:
        name = found.decode(errors="replace")
        raise _other_file(path, name, file.get(name, getlink=True).filename)


def check_dataset(dataset: Any, path: Path | Url | str) -> None:
    """Raise SourceError if an open dataset has its values in other files, or chunks that expand beyond the limit."""
    name = str(dataset.name)
    properties = dataset.id.get_create_plist()
    if properties.get_external_count():
        raise _other_file(path, name, properties.get_external(0)[0].decode(errors="replace"))
    if dataset.is_virtual:
        for source in dataset.virtual_sources():
            if source.file_name != ".":
                raise _other_file(path, name, source.file_name)
    if dataset.chunks:
        n_values = 1
        for length in dataset.chunks:
            n_values *= int(length)
        check_expansion(f"A chunk of {name} in {path}", n_values * dataset.dtype.itemsize, stored_bytes(dataset))


def check_read(dataset: Any, n_rows: int | None, what: str) -> None:
    """Raise SourceError if rows of a dataset of h5py take more memory than an item may; None: all rows.

    Values that were never written take no place in a file, and are zeros when they are read.
    """
    if hasattr(getattr(dataset, "id", None), "get_storage_size"):
        rows = int(dataset.shape[0]) if dataset.shape else 1
        row_bytes = int(dataset.nbytes) // max(1, rows)
        check_expansion(what, row_bytes * (rows if n_rows is None else n_rows), stored_bytes(dataset))


def stored_bytes(dataset: Any) -> int:
    """Return how many bytes of a dataset are in the file, compressed or not."""
    return int(dataset.id.get_storage_size())


def _other_file(path: Path | Url | str, name: str, target: str) -> SourceError:
    return SourceError(
        f"All data of {path} must be in this file, but those of {name} are in another: {target!r}. Copy them into one "
        "file, such as with h5copy, or for NWB with NWBHDF5IO.export and link_data=False."
    )
