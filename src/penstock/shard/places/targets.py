"""Where the side indexes and the manifest of archives are written: to a folder, or beside the archives of a URL."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.core.errors import DamageError, SourceError, WriteError
from penstock.core.text import cause
from penstock.files.durable import remove_asides, write_aside
from penstock.files.locks import FolderLock
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.files.stores.store import open_store
from penstock.shard.manifest import MANIFEST, Manifest

__all__ = ["FolderTarget", "Target", "UrlTarget"]

_KEPT = "dataset_metadata.before_index"
_UPLOADS = 16  # at once

_Files = Sequence[tuple[str, bytes]]
"""Names and contents; the manifest comes last."""


class FolderTarget:
    """A folder of this machine; it is made if there is none."""

    def __init__(self, folder: Path) -> None:
        self.place = folder

    def read_manifest(self, name: str) -> Manifest:
        """Read a manifest that is there."""
        return Manifest.read(self.place / name)

    def write(self, files: _Files) -> None:
        """Write files in order, after removing what a writer that was killed left behind."""
        try:
            self.place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WriteError(f"Could not write to {self.place}: {cause(error)}.") from error
        lock = FolderLock(self.place)
        try:
            try:
                remove_asides(self.place, {name for name, _ in files})
            except OSError as error:
                raise WriteError(f"Could not write to {self.place}: {cause(error)}.") from error
            self._keep_other_manifest(files[-1][0])
            for name, content in files:
                write_aside(self.place / name, content)
        finally:
            lock.release()

    def _keep_other_manifest(self, name: str) -> None:
        path = self.place / name
        if not (_is_kept(self, name) and path.exists()):
            return
        kept = path.with_name(f"{_KEPT}.json")
        while kept.exists():
            kept = kept.with_name(f"{kept.stem}_.json")
        path.rename(kept)


class UrlTarget:
    """A folder at a URL."""

    def __init__(self, folder: RemoteFolder) -> None:
        self.place, self._folder = folder.url, folder

    def read_manifest(self, name: str) -> Manifest:
        """Read a manifest that is there."""
        return Manifest.fetch(self._folder, name)

    def write(self, files: _Files) -> None:
        """Write files, several at once, and the manifest when all others are there."""
        store = open_store(self.place, self._folder.options.store)
        name, content = files[-1]
        try:
            if _is_kept(self, name):
                store.put(f"{_KEPT}.json", self._folder.read_object(name))
            with ThreadPoolExecutor(_UPLOADS) as pool:
                list(pool.map(lambda file: store.put(*file), files[:-1]))
            store.put(name, content)
        except WriteError as error:
            raise WriteError(
                f"{error} To keep the index on this machine instead, name a folder with output=..."
            ) from error


Target = FolderTarget | UrlTarget
"""Where an index is written to."""


def _is_kept(target: Target, name: str) -> bool:
    """Return whether there is a manifest of another program, which must not be overwritten."""
    if name != MANIFEST:
        return False
    try:
        target.read_manifest(name)
    except DamageError:
        return False
    except SourceError as error:
        return "was not written by Penstock" in str(error)
    return False
