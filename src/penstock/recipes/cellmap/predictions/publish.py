"""From chunks to an image, by the protocol of `files.staging`.

.NAME.writing/options.json   a write has begun: its options, and the run it belongs to
.NAME.writing/image/         the image, chunk by chunk
.NAME.writing/.….aside       incomplete files
.NAME.writing/replaced/      the previous image, from when the new one is complete until it is in place
.NAME.writing/finished.json  the options, just before and after the image appears
.NAME.written/               the same folder, about to be removed
NAME/                        the image; its attributes name the run
"""

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.core.errors import OptionError, ResumeError, WriteError
from penstock.core.text import cause
from penstock.files.locks import FolderLock
from penstock.files.regular import read_regular
from penstock.files.staging import Staging
from penstock.recipes.cellmap.predictions.ngff import Coordinates, ImageLayout, ImageStore

__all__ = ["UnfinishedImage", "begin_images"]


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
    layout
        Shape, chunks and position of the image.
    chunks
        The coordinates of all chunks to write.
    options
        Plain JSON; must be the same when a writer resumes.
    """

    def __init__(
        self,
        place: Path,
        layout: ImageLayout,
        chunks: frozenset[Coordinates],
        options: Mapping[str, Any],
    ) -> None:
        self.place, self._layout, self._all = place, layout, chunks
        self.options: dict[str, Any] = json.loads(json.dumps(options))
        self._staging = Staging(place.with_name(f".{place.name}.writing"), place, "image")
        self.store = ImageStore(self._staging.commit, self._staging.folder)
        self.missing: set[Coordinates] = set(self._all)
        self.is_published = False
        self._lock: FolderLock | None = None

    @property
    def is_open(self) -> bool:
        """Whether writing has begun, and the image is neither published nor closed."""
        return self._lock is not None

    # -- stored state --------------------------------------------------------------------------------------------------

    def unfinished_run(self) -> str | None:
        """Return the run that an unfinished write belongs to; None if there is none."""
        found = _parse_object(self._staging.options)
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
        if self._lock is None:
            self._lock = FolderLock(self._staging.folder)
        is_resumed = self.unfinished_run() == run
        if is_resumed:
            self._check_options()
        else:
            self._restore_replaced()
            self._staging.clear()
        if is_resumed and not self._staging.commit.exists() and self.published_run() == run:
            self._staging.remove()  # interrupted right after the last rename
            self.mark_published()
            self.close()
            return False
        self._staging.begin(json.dumps({"run": run, "options": self.options}, indent=1))
        self.missing = {chunk for chunk in self._all if not (is_resumed and self.store.has_chunk(chunk))}
        return not is_resumed

    def mark_published(self) -> None:
        """Mark the image as published: nothing is left to write."""
        self.missing, self.is_published = set(), True
        self._staging.clean_up()

    def write(self, chunk: Coordinates, values: Any) -> None:
        """Store one chunk; the last values given count."""
        if self._lock is None:
            raise WriteError(f"The writer of {self.place} must be open, but it is finished or closed. Make a new one.")
        self.store.write_chunk(chunk, values)
        self.missing.discard(chunk)

    def complete(self, name: str) -> None:
        """Write metadata, and sync everything to disk."""
        run = self.unfinished_run()
        self.store.write_metadata(name, self._layout, {"penstock": {"run": run, "options": self.options}})
        tree = os.walk(self._staging.commit)
        self._staging.prepare(Path(folder) / name for folder, _, files in tree for name in (*files, ""))

    def publish(self) -> None:
        """Move the image to its path, and remove the previous one."""
        self._write_groups()
        self._staging.publish()
        self.mark_published()
        self.close()

    def close(self) -> None:
        """Release the lock; what was written stays."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def discard(self) -> None:
        """Remove an unfinished write."""
        shutil.rmtree(self._staging.folder, ignore_errors=True)

    def _write_groups(self) -> None:
        """Make zarr groups of the folders from the image up to an enclosing NAME.zarr, so that zarr can open it."""
        parents = list(self.place.parents)
        root = next((number for number, path in enumerate(parents) if path.suffix == ".zarr"), -1)
        for path in parents[: root + 1]:
            if not any((path / name).exists() for name in (".zgroup", ".zarray", "zarr.json")):
                self.store.write_file(path / ".zgroup", b'{"zarr_format": 2}')

    def _restore_replaced(self) -> None:
        """Move the previous image back to its path, if an unfinished write had moved it away."""
        try:
            if self._staging.replaced.exists() and not os.path.lexists(self.place):
                self._staging.replaced.rename(self.place)
        except OSError as error:
            raise WriteError(f"Could not move the previous image back to {self.place}: {cause(error)}.") from error

    def _check_options(self) -> None:
        found = (_parse_object(self._staging.options) or {}).get("options", {})
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


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return _parse_object(read_regular(path))
    except OSError:
        return None


def _parse_object(text: str | bytes | None) -> dict[str, Any] | None:
    """Return a JSON object; None if it is something else."""
    try:
        found = json.loads(text or b"")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
