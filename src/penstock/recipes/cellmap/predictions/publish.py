"""From chunks to an image: it is written beside its place, and moved there when it is whole.

.NAME.writing/options.json   a write was begun; what it will be, and the run that it belongs to
.NAME.writing/image/         the image, chunk by chunk
.NAME.writing/aside/         files that are not whole yet
.NAME.writing/replaced/      the image that was there before, from when the new one is whole until it has its place
.NAME.written/               the same folder, on its way to be removed
NAME/                        the image is there; its attributes name the run
"""

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from penstock.core.errors import OptionError, ResumeError, WriteError
from penstock.files.durable import sync
from penstock.files.locks import lock, unlock
from penstock.recipes.cellmap.predictions.ngff import Coordinates, ImageLayout, ImageStore
from penstock.source.read_pool import Together

__all__ = ["UnfinishedImage", "begin_images"]

_SYNCS = 8  # at once; waiting for a disk takes no CPU


class UnfinishedImage:
    """An image that is being written; `missing` are the pieces that are not there yet.

    1. The process is killed: what is at the image's place stays as it was. The pieces that were written stay beside it.
    2. The disk is full: WriteError. All pieces that are there are whole.
    3. Another process writes the same image: WriteError.
    4. `publish` is interrupted: the old image, or the new one, is at its place or in `.NAME.writing`, whole; a writer
       that resumes moves the new one there, and one that begins anew moves the old one back.

    Parameters
    ----------
    place
        Where the image will be.
    levels
        Of its pyramid.
    pieces
        Arrays below the image's folder and chunks of them, all of which have to be written.
    options
        Plain JSON; to be the same where a writer resumes.
    """

    def __init__(
        self,
        place: Path,
        levels: tuple[ImageLayout, ...],
        pieces: tuple[str, frozenset[Coordinates]],
        options: Mapping[str, Any],
    ) -> None:
        self.place, self.levels, self._array, self._all = place, levels, *pieces
        self.options: dict[str, Any] = json.loads(json.dumps(options))
        self.writing = place.with_name(f".{place.name}.writing")
        self._written = place.with_name(f".{place.name}.written")
        self.store = ImageStore(self.writing / "image", self.writing / "aside")
        self.scratch = ImageStore(self.writing, self.writing / "aside")
        self.missing: set[Coordinates] = set(self._all)
        self.is_published = False
        self._handle: int | None = None
        self._process = os.getpid()

    @property
    def is_open(self) -> bool:
        """Whether it is begun, and neither published nor closed."""
        return self._handle is not None

    # -- what is there -------------------------------------------------------------------------------------------------

    def begun(self) -> str | None:
        """Return the run that an unfinished write belongs to; None where there is none."""
        found = _read_json(self.writing / "options.json")
        return None if found is None else str(found.get("run"))

    def published(self) -> str | None:
        """Return the run that wrote the image at its place, with these very options; None where there is none."""
        found = (_read_json(self.place / ".zattrs") or {}).get("penstock")
        return str(found.get("run")) if isinstance(found, dict) and found.get("options") == self.options else None

    def check_replaceable(self) -> None:
        """Raise where something else than an image is in the way."""
        if not os.path.lexists(self.place):
            return
        found = _read_json(self.place / ".zattrs") or {}
        newer = (_read_json(self.place / "zarr.json") or {}).get("attributes", {})
        if "multiscales" not in found and "ome" not in newer:
            raise OptionError(
                f"{self.place} is there and no OME-NGFF image; it is not replaced. Move it away, or use another path."
            )

    # -- writing -------------------------------------------------------------------------------------------------------

    def begin(self, run: str) -> bool:
        """Start anew, or go on where `run` was begun already; return whether it is anew.

        What is at the image's place is left as it is.
        """
        if self._handle is None:
            self._handle = lock(self.writing)
        going_on = self.begun() == run
        if going_on:
            self._check_options()
        else:
            self._clear()
            content = json.dumps({"run": run, "options": self.options}, indent=1).encode()
            self.scratch.write_file(self.writing / "options.json", content)
        shutil.rmtree(self.writing / "aside", ignore_errors=True)
        shutil.rmtree(self._written, ignore_errors=True)
        if going_on and not (self.writing / "image").exists() and self.published() == run:
            self._remove()  # it was interrupted right after the last rename
            self.leave()
            self.close()
            return False
        store = self.store if self._array == "s0" else self.scratch
        self.missing = {piece for piece in self._all if not (going_on and store.has_chunk(self._array, piece))}
        return not going_on

    def leave(self) -> None:
        """Nothing is left to write: the image is at its place."""
        self.missing, self.is_published = set(), True
        shutil.rmtree(self._written, ignore_errors=True)

    def write(self, piece: Coordinates, values: Any) -> None:
        """Store one piece; the last one that is given counts."""
        if self._handle is None:
            raise WriteError(f"{self.place} is finished or closed; make a new writer.")
        (self.store if self._array == "s0" else self.scratch).write_chunk(self._array, piece, values)
        self.missing.discard(piece)

    def complete(self, name: str) -> None:
        """Write metadata and the coarser levels, and let everything last."""
        run = self.begun()
        self.store.write_metadata(name, self.levels, {"penstock": {"run": run, "options": self.options}})
        self.store.write_levels(self.levels)
        try:
            paths = [
                Path(folder) / name for folder, _, files in os.walk(self.writing / "image") for name in (*files, "")
            ]
            # Several at once: a journal takes them together.
            Together(_SYNCS).run([partial(_synced, path) for path in paths])
        except OSError as error:
            raise WriteError(f"Could not write {self.place}: {error}") from error

    def publish(self) -> None:
        """Move the image to its place, and remove the one that was there before."""
        image, replaced = self.writing / "image", self.writing / "replaced"
        try:
            if os.path.lexists(self.place):
                shutil.rmtree(replaced, ignore_errors=True)
                self.place.rename(replaced)  # from here on, there is no image until the next line
            image.rename(self.place)
            self._name_groups()
            sync(self.place.parent)
            self._remove()
        except OSError as error:
            raise WriteError(f"Could not move the image to {self.place}: {error}. Go on with resume=True.") from error
        self.leave()
        self.close()

    def close(self) -> None:
        """Let other writers in; what was written stays."""
        handle, self._handle = self._handle, None
        if handle is not None and self._process == os.getpid():
            unlock(handle)
        elif handle is not None:  # a fork has the same lock, and must not let go of it
            os.close(handle)

    def forget(self) -> None:
        """Remove what was begun."""
        shutil.rmtree(self.writing, ignore_errors=True)

    def _name_groups(self) -> None:
        """Make groups of the folders between the image and a NAME.zarr that it is in, so that zarr opens that, too."""
        parents = list(self.place.parents)
        root = next((number for number, path in enumerate(parents) if path.suffix == ".zarr"), -1)
        for path in parents[: root + 1]:
            if not any((path / name).exists() for name in (".zgroup", ".zarray", "zarr.json")):
                self.store.write_file(path / ".zgroup", b'{"zarr_format": 2}')

    def _remove(self) -> None:
        """Remove the folder of a finished write: its name at once, then what is in it."""
        shutil.rmtree(self._written, ignore_errors=True)
        self.writing.rename(self._written)
        shutil.rmtree(self._written)

    def _clear(self) -> None:
        """Forget an unfinished write; an image that it had taken from its place goes back there."""
        replaced = self.writing / "replaced"
        try:
            if replaced.exists() and not os.path.lexists(self.place):
                replaced.rename(self.place)
            for path in self.writing.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:
            raise WriteError(f"Could not clear {self.writing}: {error}") from error

    def _check_options(self) -> None:
        found = (_read_json(self.writing / "options.json") or {}).get("options", {})
        for name in sorted(set(found) | set(self.options)):
            if found.get(name) != self.options.get(name):
                raise ResumeError(
                    f"The unfinished write of {self.place} has {name} {found.get(name)}, but {self.options.get(name)} "
                    "is asked for; use what it was begun with, or begin anew with resume=False and overwrite=True."
                )


def begin_images(images: Sequence[UnfinishedImage], *, overwrite: bool, resume: bool) -> None:
    """Begin all images, or go on with them; raise before anything is touched where that is not what was asked for."""
    begun = {run for image in images if (run := image.begun()) is not None}
    if begun and not (resume or overwrite):
        raise WriteError(
            f"There is an unfinished write of {images[0].place}; go on with resume=True, or begin anew with "
            "overwrite=True."
        )
    if resume and len(begun) > 1:
        raise ResumeError(
            f"The unfinished writes of {images[0].place} and others are not of one run; begin anew with resume=False "
            "and overwrite=True."
        )
    run = next(iter(begun)) if resume and begun else f"{time.time_ns()}-{os.getpid()}"
    finished = []
    for image in images:
        if resume and (image.published() == run if begun else image.published() is not None and not overwrite):
            finished.append(image)
        elif os.path.lexists(image.place):
            if not overwrite:
                raise OptionError(f"{image.place} is there already; use overwrite=True, or another path.")
            image.check_replaceable()
    anew = []
    try:
        for image in images:
            if image in finished and image.begun() is None:
                image.leave()
            elif image.begin(run):
                anew.append(image)
    except BaseException:
        for image in images:
            if image in anew:
                image.forget()
            image.close()
        raise


def _synced(path: Path) -> int:
    sync(path)
    return 0


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
