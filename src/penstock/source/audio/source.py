"""Windows of audio files, or whole files, as items: exact to the frame, at one sampling rate."""

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, ReadError, SourceError
from penstock.core.index import Index
from penstock.core.types import Block, Field, Span
from penstock.source.audio.file import AudioFile, AudioTrack, Channels, audio_files, check_sound
from penstock.source.audio.resample import Resampler
from penstock.source.checks import check_items, check_span

__all__ = ["AudioSource"]

_Int64s = NDArray[np.int64]
_Path = str | os.PathLike[str]

Tail = Literal["short", "drop"]

_CACHE_BYTES = 16 << 20  # of an ogg file that is open: a minute and a half of one channel


class AudioSource:
    """Items are windows of wav, flac and ogg files, one after the other; a chunk is a file.

    The field is called `audio`: float32 of shape (frames, channels), integers scaled to -1 … 1. It has a fixed shape
    where all items have the same one, and is an array of objects where they have not. Windows of a resampled file are
    slices of the whole resampled file.

    In wav and flac files, a window is found by seeking. An ogg file is decoded from its beginning (libsndfile's seeks
    are not exact there), so that windows of it are cheap only in storage order: use `Sequential` or `WindowShuffle`,
    which read each file once, or convert the files to flac.

    1. A file that is missing, empty, truncated or no audio: SourceError or ReadError, which names it, at once.
    2. Damage within a flac or ogg file: ReadError when it is read. Samples of a wav file have no checksum.
    3. A file that is replaced by another one, or goes away, before it is read: ReadError.
    4. A fork in the middle, several threads: each process opens its own files, each thread has one to itself.

    Parameters
    ----------
    files
        Paths, in this order; or a folder, for all that is in it and in the folders within.
    window_frames
        Frames of an item, after resampling; None: items are whole files.
    rate_hz
        The sampling rate of the items; None: that of the files, which must then have the same.
    channels
        `"mono"` gives the mean of all channels, as one; `"keep"` leaves them.
    tail
        What becomes of the end of a file that fills no window: a `"short"` item, or `"drop"` it, and with it files that
        are shorter than a window.
    open_files
        Files that are kept open between reads, by each process.
    """

    def __init__(
        self,
        files: _Path | Sequence[_Path],
        *,
        window_frames: int | None = None,
        rate_hz: float | None = None,
        channels: Channels = "mono",
        tail: Tail = "short",
        open_files: int = 8,
    ) -> None:
        check_sound(rate_hz, channels)
        if tail not in get_args(Tail):
            raise OptionError(f"tail={tail!r}; use 'short' or 'drop'.")
        if window_frames is not None:
            window_frames = check_integer("window_frames", window_frames, at_least=1)
        check_integer("open_files", open_files, at_least=1)
        infos = tuple(_Info.of(path) for path in _paths(files))
        self.files = tuple(info.path for info in infos)
        self.rate_hz, self._totals = _at_rate(infos, rate_hz)
        self._window = window_frames
        self._reading = _Reading(infos, rate_hz, channels == "mono", window_frames, open_files)
        counts = _counts(self._totals, window_frames, tail)
        self._borders = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        if not self._borders[-1]:
            raise SourceError(
                f"None of {len(infos)} files has a window of {window_frames} frames: the longest, "
                f"{self.files[int(self._totals.argmax())]}, has {self._totals.max()}. Use a smaller window_frames, or "
                "tail='short'."
            )
        shape = _one_shape(
            self._totals, counts, window_frames, [1 if channels == "mono" else i.n_channels for i in infos]
        )
        self.fields: dict[str, Field] = {"audio": Field(np.dtype(np.float32 if shape else object), shape)}
        self.index = Index.from_sizes(counts, identity=_identity(infos, (window_frames, self.rate_hz, channels, tail)))
        self._handles: _Handles | None = None

    def __repr__(self) -> str:
        return f"AudioSource({len(self.files)} files, {len(self.index)} items of audio)"

    def windows(self, items: _Int64s) -> tuple[_Int64s, _Int64s, _Int64s]:
        """Return the file of each item (a number in `files`), its first frame and the frame after its last."""
        items = check_items(items, self)
        files = np.searchsorted(self._borders, items, side="right") - 1
        totals = self._totals[files]
        if self._window is None:
            return files, np.zeros_like(items), totals
        starts = (items - self._borders[files]) * self._window
        return files, starts, np.minimum(starts + self._window, totals)

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items; each file is decoded once."""
        check_span(span, self)
        return self.take(np.arange(span.start, span.stop), out)

    def take(self, items: _Int64s, out: Block | None = None) -> Block:
        """Return any items, in the given order; they are read in storage order, each once."""
        items = check_items(items, self)
        field = self.fields["audio"]
        fixed = field.shape is not None
        given = out["audio"] if fixed and out is not None else None
        audio = np.empty((len(items), *(field.shape or ())), field.dtype) if given is None else given
        handles = self._handling()
        # wanted: each item once, ascending; rows of item n: by_item[begins[n] : begins[n + 1]]
        wanted, places = np.unique(items, return_inverse=True)
        by_item = np.argsort(places, kind="stable")
        begins = np.searchsorted(places[by_item], np.arange(len(wanted) + 1))
        windows = zip(range(len(wanted)), *(array.tolist() for array in self.windows(wanted)), strict=True)
        # A file is held for all of its windows: another thread would take it somewhere else in between.
        for file, group in groupby(windows, key=itemgetter(1)):
            with handles.using(file) as track:
                for number, _, start, stop in group:
                    window = track.frames(start, stop)
                    for row in by_item[begins[number] : begins[number + 1]].tolist():
                        # Rows of an array of objects are the caller's own, each for itself.
                        audio[row] = window if fixed else window.copy()
        return {"audio": audio}

    def close(self) -> None:
        """Let go of files, when the reads under way are done; the next read opens them again."""
        handles, self._handles = self._handles, None
        if handles is not None and handles.process == os.getpid():
            handles.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": None}

    def _handling(self) -> "_Handles":
        """Return what is open in this process; a forked one begins with nothing open or locked."""
        handles = self._handles
        if handles is None or handles.process != os.getpid():
            handles = self._handles = _Handles(self._reading)
        return handles


@dataclass(frozen=True, slots=True)
class _Info:
    """What is known of a file: what it must still be when it is read."""

    path: str
    n_bytes: int
    n_frames: int
    n_channels: int
    rate_hz: float

    @classmethod
    def of(cls, path: Path) -> "_Info":
        """Look at a file: at its ends, not at all of it."""
        file = AudioFile(path, whole=False)
        file.close()
        return cls.found(str(path), file)

    @classmethod
    def found(cls, path: str, file: AudioFile) -> "_Info":
        """Return what a file is."""
        return cls(path, file.n_bytes, *file.stored_shape, file.rate_hz)


@dataclass(frozen=True, slots=True)
class _Reading:
    """How files are read."""

    infos: tuple[_Info, ...]
    rate_hz: float | None
    mono: bool
    window_frames: int | None
    open_files: int

    def open(self, number: int) -> AudioTrack:
        """Open a file, and compare it with what it was."""
        info = self.infos[number]
        try:
            file = AudioFile(Path(info.path), mono=self.mono)
        except SourceError as error:  # it could be a source when it was looked at
            raise ReadError(str(error)) from error
        now = _Info.found(info.path, file)
        if now != info:
            file.close()
            raise ReadError(
                f"{info.path} is another file than it was: {info.n_frames} frames in {info.n_bytes} bytes then, "
                f"{now.n_frames} in {now.n_bytes} now. Make the source anew."
            )
        return AudioTrack(file, self.rate_hz, cache_bytes=self._cache_bytes(file))

    def _cache_bytes(self, file: AudioFile) -> int:
        """Return what to keep of what was decoded: something where going back costs all that is before."""
        if file.seekable or self.window_frames is None:
            return 0
        ratio = 1.0 if self.rate_hz is None else file.rate_hz / self.rate_hz
        return max(_CACHE_BYTES, 4 * int(self.window_frames * ratio) * file.shape[1] * file.dtype.itemsize)


class _Handles:
    """Files that are open in one process; a thread that uses one has it to itself."""

    # 1. Two threads want one file: the second opens it once more.
    # 2. A read fails: its file is closed, and opened anew for the next read.
    # 3. More files are unused than may stay open: that which was used longest ago is closed.
    # 4. close() while files are in use: they are closed by those who use them, when they are done.

    def __init__(self, reading: _Reading) -> None:
        self.process = os.getpid()
        self._reading, self._lock = reading, threading.Lock()
        self._unused: list[tuple[int, AudioTrack]] = []
        self._closed = False

    @contextmanager
    def using(self, number: int) -> Iterator[AudioTrack]:
        """Give an open file to one thread."""
        track = self._taken(number) or self._reading.open(number)
        try:
            yield track
        except BaseException:
            track.close()
            raise
        self._put_back(number, track)

    def close(self) -> None:
        """Close what is not in use, now, and the rest when it is put back."""
        with self._lock:
            self._closed = True
            unused, self._unused = self._unused, []
        for _, track in unused:
            track.close()

    def _taken(self, number: int) -> AudioTrack | None:
        with self._lock:
            for place in reversed(range(len(self._unused))):
                if self._unused[place][0] == number:
                    return self._unused.pop(place)[1]
        return None

    def _put_back(self, number: int, track: AudioTrack) -> None:
        with self._lock:
            self._unused.append((number, track))
            keep = 0 if self._closed else self._reading.open_files
            surplus = self._unused[: max(0, len(self._unused) - keep)]
            del self._unused[: len(surplus)]
        for _, unused in surplus:
            unused.close()


def _paths(files: _Path | Sequence[_Path]) -> list[Path]:
    if isinstance(files, str | os.PathLike):
        folder = Path(files).absolute()
        found = audio_files(folder) if not folder.is_file() else [folder]
        if not found:
            raise SourceError(f"There is no wav, flac or ogg file in {folder}.")
        return found
    # Absolute: a worker process may have been started in another folder.
    given = [Path(path).absolute() for path in files]
    if not given:
        raise SourceError("AudioSource got no files; give paths of wav, flac or ogg files, or a folder.")
    return given


def _at_rate(infos: Sequence[_Info], rate_hz: float | None) -> tuple[float, _Int64s]:
    """Return the sampling rate of the items, and the frames of each file at that rate."""
    rates = {info.rate_hz: info.path for info in infos}
    if rate_hz is None:
        if len(rates) > 1:
            said = ", ".join(f"{path} has {rate:.10g} Hz" for rate, path in list(rates.items())[:3])
            raise SourceError(f"The files differ in their sampling rate: {said}; resample them with rate_hz.")
        return infos[0].rate_hz, np.array([info.n_frames for info in infos], np.int64)
    resamplers = {rate: Resampler(rate, rate_hz) for rate in rates}
    totals = [resamplers[info.rate_hz].n_out(info.n_frames) for info in infos]
    return float(rate_hz), np.array(totals, np.int64)


def _counts(totals: _Int64s, window: int | None, tail: Tail) -> _Int64s:
    """Return how many items each file has."""
    if window is None:
        return np.ones_like(totals)
    return totals // window if tail == "drop" else -(-totals // window)


def _one_shape(
    totals: _Int64s, counts: _Int64s, window: int | None, n_channels: Sequence[int]
) -> tuple[int, int] | None:
    """Return the shape of all items; None where they differ."""
    there = counts > 0
    length = window or 0  # whole files have no window but their last
    last = np.minimum(totals - (counts - 1) * length, window or totals)[there]
    lengths = {*last.tolist(), *([length] if (counts > 1).any() else [])}
    widths = set(np.array(n_channels)[there].tolist())
    return (lengths.pop(), widths.pop()) if len(lengths) == len(widths) == 1 else None


def _identity(infos: Sequence[_Info], options: tuple[Any, ...]) -> str:
    """Return what tells these items from others: not where the files lie, but what they are called there."""
    digest = hashlib.blake2b(repr(options).encode(), digest_size=8)
    folder = os.path.commonpath([os.path.dirname(info.path) for info in infos])  # noqa: PTH120
    for info in infos:
        name = Path(info.path).relative_to(folder).as_posix()
        digest.update(repr((name, info.n_bytes, info.n_frames, info.n_channels, info.rate_hz)).encode())
    return digest.hexdigest()
