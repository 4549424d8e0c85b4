"""Recognizes N5, which zarr-python 3 does not read."""

from pathlib import Path, PurePosixPath

from penstock.core.errors import SourceError

__all__ = ["refuse_n5"]


def refuse_n5(where: str) -> None:
    """Raise SourceError if a group or array at a path or URL is stored as N5."""
    is_local = "://" not in where
    if is_local and any((Path(where) / name).exists() for name in ("zarr.json", ".zarray", ".zgroup", ".zattrs")):
        return
    is_named_n5 = any(part.endswith(".n5") for part in PurePosixPath(where).parts)
    if is_named_n5 or (is_local and (Path(where) / "attributes.json").is_file()):
        raise SourceError(
            f"{where} is stored as N5, which zarr 3 does not read. Copy it to zarr first: in an environment with "
            "zarr 2, `zarr.copy_all(zarr.open(zarr.N5FSStore(N5_PATH), 'r'), zarr.open(ZARR_PATH, 'w'))`, or with "
            "tensorstore, whose driver 'n5' reads it. Then open the copy as an image of OME-NGFF, or one of its arrays "
            "with Multiscale.plain(path, scale)."
        )
