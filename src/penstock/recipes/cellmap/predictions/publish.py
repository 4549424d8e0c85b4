"""From chunks to an image: it is written beside its path, and moved there when it is complete.

.NAME.writing/options.json   a write has begun: its options, and the run it belongs to
.NAME.writing/image/         the image, chunk by chunk
.NAME.writing/aside/         incomplete files
.NAME.writing/replaced/      the previous image, from when the new one is complete until it is in place
.NAME.written/               the same folder, about to be removed
NAME/                        the image; its attributes name the run
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
from penstock.files.staging import remove_staging
from penstock.recipes.cellmap.predictions.ngff import Coordinates, ImageLayout, ImageStore
from penstock.source.read_pool import ReadPool

__all__ = ["UnfinishedImage", "begin_images"]

_SYNCS = 8  # concurrent syncs; waiting for a disk takes no CPU


class UnfinishedImage:
    """An image that is being written; `missing` holds the chunks that are not written yet.

    1. The process is killed: what is at the image's path stays as it was. Written chunks stay beside it.
    2. The disk is full: WriteError. All chunks that exist are complete.
    3. Another process writes the same image: WriteError.
    4. `publish` is interrupted: the old image or the new one is complete, at its path or in `.NAME.writing`. A writer
       that resumes moves the new one to its path, one that starts over moves the old one back.

    Parameters
    ----------
    place
        Path of the finished image.
    levels
        Levels of the pyramid.
    chunks
        Name of an array in the image's folder, and the coordinates of all its chunks to write.
    options
        Plain JSON; must be the same when a writer resumes.
    """

    def __init__(
        self,
        place: Path,
        levels: tuple[ImageLayout, ...],
        chunks: tuple[str, frozenset[Coordinates]],
        options: Mapping[str, Any],
    ) -> None:
        self.place, self.levels, self._array, self._all = place, levels, *chunks
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
        """Whether writing has begun, and the image is neither published nor closed."""
        return self._handle is not None

    # -- stored state --------------------------------------------------------------------------------------------------

    def unfinished_run(self) -> str | None:
        """Return the run that an unfinished write belongs to; None if there is none."""
        found = _read_json(self.writing / "options.json")
        return None if found is None else str(found.get("run"))

    def published_run(self) -> str | None:
        """Return the run that wrote the image at its path with the same options; None if there is none."""
        found = (_read_json(self.place / ".zattrs") or {}).get("penstock")
        return str(found.get("run")) if isinstance(found, dict) and found.get("options") == self.options else None

    def check_replaceable(self) -> None:
        """Raise if something other than an image is at the path."""
        if not os.path.lexists(self.place):
            return
        found = _read_json(self.place / ".zattrs") or {}
        newer = (_read_json(self.place / "zarr.json") or {}).get("attributes", {})
        if "multiscales" not in found and "ome" not in newer:
            raise OptionError(
                f"Only OME-NGFF images are replaced, and {self.place} is none. Move it away, or use another path."
            )

    # -- writing -------------------------------------------------------------------------------------------------------

    def begin(self, run: str) -> bool:
        """Start over, or resume if the unfinished write belongs to `run`; return whether it starts over.

        What is at the image's path is not touched.
        """
        if self._handle is None:
            self._handle = lock(self.writing)
        is_resumed = self.unfinished_run() == run
        if is_resumed:
            self._check_options()
        else:
            self._clear()
            content = json.dumps({"run": run, "options": self.options}, indent=1).encode()
            self.scratch.write_file(self.writing / "options.json", content)
        shutil.rmtree(self.writing / "aside", ignore_errors=True)
        shutil.rmtree(self._written, ignore_errors=True)
        if is_resumed and not (self.writing / "image").exists() and self.published_run() == run:
            remove_staging(self.writing, self._written)  # interrupted right after the last rename
            self.mark_published()
            self.close()
            return False
        store = self.store if self._array == "s0" else self.scratch
        self.missing = {chunk for chunk in self._all if not (is_resumed and store.has_chunk(self._array, chunk))}
        return not is_resumed

    def mark_published(self) -> None:
        """Mark the image as published: nothing is left to write."""
        self.missing, self.is_published = set(), True
        shutil.rmtree(self._written, ignore_errors=True)

    def write(self, chunk: Coordinates, values: Any) -> None:
        """Store one chunk; the last values given count."""
        if self._handle is None:
            raise WriteError(f"The writer of {self.place} must be open, but it is finished or closed. Make a new one.")
        (self.store if self._array == "s0" else self.scratch).write_chunk(self._array, chunk, values)
        self.missing.discard(chunk)

    def complete(self, name: str) -> None:
        """Write metadata and the coarser levels, and sync everything to disk."""
        run = self.unfinished_run()
        self.store.write_metadata(name, self.levels, {"penstock": {"run": run, "options": self.options}})
        self.store.write_levels(self.levels)
        try:
            paths = [
                Path(folder) / name for folder, _, files in os.walk(self.writing / "image") for name in (*files, "")
            ]
            # Several at once: a journal commits them together.
            ReadPool(_SYNCS).run([partial(_sync_path, path) for path in paths])
        except OSError as error:
            raise WriteError(f"Could not write {self.place}: {error}") from error

    def publish(self) -> None:
        """Move the image to its path, and remove the previous one."""
        image, replaced = self.writing / "image", self.writing / "replaced"
        try:
            if os.path.lexists(self.place):
                shutil.rmtree(replaced, ignore_errors=True)
                self.place.rename(replaced)  # there is no image at the path until the next line
            image.rename(self.place)
            self._write_groups()
            sync(self.place.parent)
            remove_staging(self.writing, self._written)
        except OSError as error:
            raise WriteError(f"Could not move the image to {self.place}: {error}. Resume with resume=True.") from error
        self.mark_published()
        self.close()

    def close(self) -> None:
        """Release the lock; what was written stays."""
        handle, self._handle = self._handle, None
        if handle is not None and self._process == os.getpid():
            unlock(handle)
        elif handle is not None:  # a fork shares the lock and must not release it
            os.close(handle)

    def discard(self) -> None:
        """Remove an unfinished write."""
        shutil.rmtree(self.writing, ignore_errors=True)

    def _write_groups(self) -> None:
        """Make zarr groups of the folders from the image up to an enclosing NAME.zarr, so that zarr can open it."""
        parents = list(self.place.parents)
        root = next((number for number, path in enumerate(parents) if path.suffix == ".zarr"), -1)
        for path in parents[: root + 1]:
            if not any((path / name).exists() for name in (".zgroup", ".zarray", "zarr.json")):
                self.store.write_file(path / ".zgroup", b'{"zarr_format": 2}')

    def _clear(self) -> None:
        """Remove an unfinished write; a previous image that it had moved goes back to its path."""
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
                    f"To resume the unfinished write of {self.place}, {name} must be {found.get(name)}, got "
                    f"{self.options.get(name)}. Use the same, or start over with resume=False and overwrite=True."
                )


def begin_images(images: Sequence[UnfinishedImage], *, overwrite: bool, resume: bool) -> None:
    """Begin or resume all images; raise before anything is touched if the options do not allow it."""
    runs = {run for image in images if (run := image.unfinished_run()) is not None}
    if runs and not (resume or overwrite):
        raise WriteError(
            f"There is an unfinished write of {images[0].place}. Resume it with resume=True, or start over with "
            "overwrite=True."
        )
    if resume and len(runs) > 1:
        raise ResumeError(
            f"The unfinished writes of {images[0].place} and others must belong to one run, but do not. Start over "
            "with resume=False and overwrite=True."
        )
    run = next(iter(runs)) if resume and runs else f"{time.time_ns()}-{os.getpid()}"
    finished = []
    for image in images:
        published = image.published_run()
        if resume and (published == run if runs else published is not None and not overwrite):
            finished.append(image)
        elif os.path.lexists(image.place):
            if not overwrite:
                raise OptionError(f"{image.place} already exists. Use overwrite=True, or another path.")
            image.check_replaceable()
    started = []
    try:
        for image in images:
            if image in finished and image.unfinished_run() is None:
                image.mark_published()
            elif image.begin(run):
                started.append(image)
    except BaseException:
        for image in images:
            if image in started:
                image.discard()
            image.close()
        raise


def _sync_path(path: Path) -> int:
    sync(path)
    return 0


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
