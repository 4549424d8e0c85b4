"""Items from audio files: windows or whole files, exact to the frame, at one sampling rate."""

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
from penstock.files.kinds import local_path
from penstock.source.audio.file import (
    AudioFile,
    AudioTrack,
    Channels,
    check_audio_options,
    check_item_bytes,
    find_audio_files,
)
from penstock.source.audio.resample import Resampler
from penstock.source.checks import check_items, check_span
from penstock.source.select.selectable import Selectable

__all__ = ["AudioSource"]

_Int64s = NDArray[np.int64]
_Path = str | os.PathLike[str]

Tail = Literal["short", "drop"]

_CACHE_BYTES = 16 << 20  # per open ogg or mp3 file: a minute and a half of one channel


class AudioSource(Selectable):
    """Items are consecutive windows of wav, flac, ogg and mp3 files; each file is a chunk.

    The only field is `audio`: float32 of shape (frames, channels), integers scaled to -1 … 1. It has a fixed shape if
    all items have the same shape, else it is an array of objects. Windows of a resampled file are slices of the whole
    resampled file.

    In wav and flac files, a window is found by seeking. An ogg or mp3 file is decoded from its beginning, because
    libsndfile does not seek exactly there. Its windows are cheap only in storage order: use `Sequential` or
    `WindowShuffle`, which read each file once, or convert the files to flac.

    1. A file that is missing, empty, truncated or no audio: SourceError or ReadError on construction, which names it.
    2. Damage within a flac or ogg file: ReadError when it is read. The frames of a wav file have no checksum.
    3. A file that is replaced or removed before it is read: ReadError.
    4. Forks and threads are safe: each process opens its own files, and a file is used by one thread at a time.

    Parameters
    ----------
    files
        Paths, in this order; or a folder, for all audio files in it and its subfolders.
    window_frames
        Frames per item, after resampling. None: items are whole files.
    rate_hz
        Sampling rate of the items. None: that of the files, which must then be the same for all.
    channels
        `"mono"`: the mean of all channels as one channel. `"keep"`: all channels.
    tail
        The end of a file that does not fill a window becomes a `"short"` item, or is `"drop"`ped; `"drop"` also skips
        files shorter than a window.
    open_files
        Maximum number of files that each process keeps open between reads.
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
        check_audio_options(rate_hz, channels)
        if tail not in get_args(Tail):
            raise OptionError(f"tail must be one of 'short', 'drop', got {tail!r}.")
        if window_frames is not None:
            window_frames = check_integer("window_frames", window_frames, at_least=1)
        check_integer("open_files", open_files, at_least=1)
        infos = tuple(_FileInfo.read(path) for path in _resolve_paths(files))
        self.files = tuple(info.path for info in infos)
        self.rate_hz, self._totals = _frames_at_rate(infos, rate_hz)
        self._window = window_frames
        self._opener = _TrackOpener(infos, rate_hz, channels == "mono", window_frames, open_files)
        counts = _items_per_file(self._totals, window_frames, tail)
        self._borders = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        if not self._borders[-1]:
            raise SourceError(
                f"At least one file must have window_frames={window_frames} frames, but the longest of {len(infos)}, "
                f"{self.files[int(self._totals.argmax())]}, has {self._totals.max()}. Use a smaller window_frames, or "
                "tail='short'."
            )
        n_channels = [1 if channels == "mono" else info.n_channels for info in infos]
        for info, total, width in zip(infos, self._totals.tolist(), n_channels, strict=True):
            check_item_bytes(
                info.path, total if window_frames is None else min(total, window_frames), width, info.n_bytes
            )
        shape = _common_shape(self._totals, counts, window_frames, n_channels)
        self.fields: dict[str, Field] = {"audio": Field(np.dtype(np.float32 if shape else object), shape)}
        self.index = Index.from_sizes(counts, identity=_identity(infos, (window_frames, self.rate_hz, channels, tail)))
        self._tracks: _OpenTracks | None = None

    def __repr__(self) -> str:
        return f"AudioSource({len(self.files)} files, {len(self.index)} items of audio)"

    def windows(self, items: _Int64s) -> tuple[_Int64s, _Int64s, _Int64s]:
        """Return the file of each item (its number in `files`), its first frame, and the frame after its last."""
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
        """Return any items, in the given order; each distinct item is read once, in storage order."""
        items = check_items(items, self)
        field = self.fields["audio"]
        fixed = field.shape is not None
        given = out["audio"] if fixed and out is not None else None
        audio = np.empty((len(items), *(field.shape or ())), field.dtype) if given is None else given
        tracks = self._process_tracks()
        # distinct: each item once, ascending; rows of item n: by_item[begins[n] : begins[n + 1]]
        distinct, places = np.unique(items, return_inverse=True)
        by_item = np.argsort(places, kind="stable")
        begins = np.searchsorted(places[by_item], np.arange(len(distinct) + 1))
        windows = zip(range(len(distinct)), *(array.tolist() for array in self.windows(distinct)), strict=True)
        # Keep a file for all of its windows, so that no other thread seeks in it in between.
        for file, group in groupby(windows, key=itemgetter(1)):
            with tracks.borrow(file) as track:
                for number, _, start, stop in group:
                    window = track.frames(start, stop)
                    for row in by_item[begins[number] : begins[number + 1]].tolist():
                        # Repeated items in an array of objects must not share memory.
                        audio[row] = window if fixed else window.copy()
        return {"audio": audio}

    @property
    def stored_bytes(self) -> int:
        """Bytes of all files."""
        return sum(info.n_bytes for info in self._opener.infos)

    @property
    def memory_bytes(self) -> int:
        """Upper bound of the memory that each process keeps between reads: decoded frames of open ogg and mp3 files."""
        sizes = sorted((self._opener.cache_bytes(info) for info in self._opener.infos), reverse=True)
        return sum(sizes[: self._opener.open_files])

    def close(self) -> None:
        """Close files once the reads in progress are done; the next read opens them again."""
        tracks, self._tracks = self._tracks, None
        if tracks is not None and tracks.process == os.getpid():
            tracks.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tracks": None}

    def _process_tracks(self) -> "_OpenTracks":
        """Return the open files of this process; after a fork, a new object: nothing open or locked."""
        tracks = self._tracks
        if tracks is None or tracks.process != os.getpid():
            tracks = self._tracks = _OpenTracks(self._opener)
        return tracks


@dataclass(frozen=True, slots=True)
class _FileInfo:
    """Properties of a file, which must be unchanged when it is read."""

    path: str
    n_bytes: int
    n_frames: int
    n_channels: int
    rate_hz: float
    seekable: bool

    @classmethod
    def read(cls, path: Path) -> "_FileInfo":
        """Read the properties of a file, without reading all of it."""
        file = AudioFile(path, whole=False)
        file.close()
        return cls.from_file(str(path), file)

    @classmethod
    def from_file(cls, path: str, file: AudioFile) -> "_FileInfo":
        """Return the properties of an open file."""
        return cls(path, file.n_bytes, *file.stored_shape, file.rate_hz, file.seekable)


@dataclass(frozen=True, slots=True)
class _TrackOpener:
    """Opens files for reading, and checks that they are unchanged."""

    infos: tuple[_FileInfo, ...]
    rate_hz: float | None
    mono: bool
    window_frames: int | None
    open_files: int

    def open(self, number: int) -> AudioTrack:
        """Open a file; raise ReadError if it has changed."""
        info = self.infos[number]
        try:
            file = AudioFile(Path(info.path), mono=self.mono)
        except SourceError as error:  # it was valid on construction
            raise ReadError(str(error)) from error
        now = _FileInfo.from_file(info.path, file)
        if now != info:
            file.close()
            raise ReadError(
                f"{info.path} has changed since the source was created: {info.n_frames} frames in {info.n_bytes} bytes "
                f"then, {now.n_frames} in {now.n_bytes} now. Create the source again."
            )
        return AudioTrack(file, self.rate_hz, cache_bytes=self.cache_bytes(info))

    def cache_bytes(self, info: _FileInfo) -> int:
        """Return the cache size: 0 if seeking is cheap, so that decoding from the beginning is not needed."""
        if info.seekable or self.window_frames is None:
            return 0
        ratio = 1.0 if self.rate_hz is None else info.rate_hz / self.rate_hz
        frame_bytes = AudioFile.dtype.itemsize * (1 if self.mono else info.n_channels)
        return max(_CACHE_BYTES, 4 * int(self.window_frames * ratio) * frame_bytes)


class _OpenTracks:
    """The open files of one process; each is used by one thread at a time."""

    # 1. Two threads need the same file: the second opens it once more.
    # 2. A read fails: its file is closed, and opened again for the next read.
    # 3. More files are unused than may stay open: the least recently used one is closed.
    # 4. close() while files are in use: each is closed when its thread returns it.

    def __init__(self, opener: _TrackOpener) -> None:
        self.process = os.getpid()
        self._opener, self._lock = opener, threading.Lock()
        self._unused: list[tuple[int, AudioTrack]] = []
        self._closed = False

    @contextmanager
    def borrow(self, number: int) -> Iterator[AudioTrack]:
        """Lend an open file to the calling thread."""
        track = self._pop_unused(number) or self._opener.open(number)
        try:
            yield track
        except BaseException:
            track.close()
            raise
        self._return(number, track)

    def close(self) -> None:
        """Close the unused files now, and the others when they are returned."""
        with self._lock:
            self._closed = True
            unused, self._unused = self._unused, []
        for _, track in unused:
            track.close()

    def _pop_unused(self, number: int) -> AudioTrack | None:
        with self._lock:
            for place in reversed(range(len(self._unused))):
                if self._unused[place][0] == number:
                    return self._unused.pop(place)[1]
        return None

    def _return(self, number: int, track: AudioTrack) -> None:
        with self._lock:
            self._unused.append((number, track))
            keep = 0 if self._closed else self._opener.open_files
            surplus = self._unused[: max(0, len(self._unused) - keep)]
            del self._unused[: len(surplus)]
        for _, unused in surplus:
            unused.close()


def _resolve_paths(files: _Path | Sequence[_Path]) -> list[Path]:
    if isinstance(files, str | os.PathLike):
        folder = local_path(files)
        found = find_audio_files(folder) if not folder.is_file() else [folder]
        if not found:
            raise SourceError(f"No wav, flac, ogg or mp3 files in {folder}.")
        return found
    # Absolute, because a worker process may have another working directory.
    given = [local_path(path) for path in files]
    if not given:
        raise SourceError("files must have at least one path of a wav, flac, ogg or mp3 file, got none.")
    return given


def _frames_at_rate(infos: Sequence[_FileInfo], rate_hz: float | None) -> tuple[float, _Int64s]:
    """Return the sampling rate of the items, and the number of frames of each file at that rate."""
    rates = {info.rate_hz: info.path for info in infos}
    if rate_hz is None:
        if len(rates) > 1:
            found = ", ".join(f"{path} has {rate:.10g} Hz" for rate, path in list(rates.items())[:3])
            raise SourceError(f"All files must have the same sampling rate: {found}. Resample them with rate_hz=...")
        return infos[0].rate_hz, np.array([info.n_frames for info in infos], np.int64)
    resamplers = {rate: Resampler(rate, rate_hz) for rate in rates}
    totals = [resamplers[info.rate_hz].n_out(info.n_frames) for info in infos]
    return float(rate_hz), np.array(totals, np.int64)


def _items_per_file(totals: _Int64s, window: int | None, tail: Tail) -> _Int64s:
    if window is None:
        return np.ones_like(totals)
    return totals // window if tail == "drop" else -(-totals // window)


def _common_shape(
    totals: _Int64s, counts: _Int64s, window: int | None, n_channels: Sequence[int]
) -> tuple[int, int] | None:
    """Return the shape of all items; None if they differ."""
    used = counts > 0
    length = window or 0  # a whole file has a single window, its last
    last = np.minimum(totals - (counts - 1) * length, window or totals)[used]
    lengths = {*last.tolist(), *([length] if (counts > 1).any() else [])}
    widths = set(np.array(n_channels)[used].tolist())
    return (lengths.pop(), widths.pop()) if len(lengths) == len(widths) == 1 else None


def _identity(infos: Sequence[_FileInfo], options: tuple[Any, ...]) -> str:
    """Return a hash of the options, and of the relative names and properties of the files."""
    digest = hashlib.blake2b(repr(options).encode(), digest_size=8)
    folder = os.path.commonpath([os.path.dirname(info.path) for info in infos])  # noqa: PTH120
    for info in infos:
        name = Path(info.path).relative_to(folder).as_posix()
        digest.update(repr((name, info.n_bytes, info.n_frames, info.n_channels, info.rate_hz)).encode())
    return digest.hexdigest()
