"""Audio files, exact to the frame, optionally resampled.

After a seek in an ogg or mp3 file, libsndfile 1.2 decodes other values than without the seek, for some hundred frames.
It also reads a truncated wav, ogg or mp3 file as a short one. So ogg and mp3 files are always decoded from their
beginning, and files are checked for completeness when they are opened.
"""

import math
import struct
import zlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import MissingDependency, OptionError, PenstockError, ReadError, SourceError
from penstock.core.limits import check_expansion
from penstock.core.text import cause, count
from penstock.files.byte_files import ByteFile, count_bytes, open_bytes, read_range
from penstock.files.spans.options import RemoteOptions
from penstock.files.stores.url import Url
from penstock.source.audio.mp3 import count_frames
from penstock.source.audio.resample import Resampler
from penstock.source.chunked_rows import ChunkedRowReader

__all__ = [
    "EXTENSIONS",
    "AudioFile",
    "AudioTrack",
    "Channels",
    "check_audio_options",
    "check_item_bytes",
    "check_positive",
    "find_audio_files",
]

EXTENSIONS = (".flac", ".mp3", ".ogg", ".wav")
"""Extensions of audio files; upper case is accepted, too. libsndfile reads mp3 since version 1.1."""

Channels = Literal["keep", "mono"]

_FORMATS = ("FLAC", "MP3", "OGG", "RF64", "WAV", "WAVEX")
_CHUNK_FRAMES = 1 << 14
_MAX_FRAMES = 1 << 48  # libsndfile reports more if the length is unknown
_UNKNOWN = 0xFFFFFFFF  # a size that was unknown when the header was written
_SKIPPED_FRAMES = 4096  # at most, by a decoder, at the beginning and the end of an mp3 file
_MAX_PAGE_BYTES = 27 + 255 + 255 * 255  # of an ogg file
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def find_audio_files(folder: Path) -> list[Path]:
    """Return the wav, flac, ogg and mp3 files in a folder and its subfolders, sorted; hidden ones are skipped."""
    if not folder.is_dir():
        raise SourceError(f"{folder} must be a folder with wav, flac, ogg or mp3 files, but it is no folder.")
    found = [
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in EXTENSIONS
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    return sorted(found)


class AudioFile:
    """A wav, flac, ogg or mp3 file as a sliceable array of shape (frames, channels).

    Values are float32; integers are scaled to -1 … 1. Nothing is cached: each slice is decoded on demand, in ogg
    and mp3 files together with all frames before it. Not thread-safe.

    Parameters
    ----------
    mono
        Return the mean of all channels as one channel.
    whole
        Verify the checksums of all pages of an ogg file, which reads the whole file. False: of the last page only.
    remote
        How a URL is reached.
    """

    dtype = np.dtype(np.float32)

    def __init__(
        self, path: Path | Url, *, mono: bool = False, whole: bool = True, remote: RemoteOptions | None = None
    ) -> None:
        try:
            import soundfile  # type: ignore[import-untyped]  # noqa: PLC0415  # it has no types
        except (ImportError, OSError) as error:  # OSError: libsndfile is missing
            raise MissingDependency("soundfile", "audio", "Reading audio") from error
        self._remote = remote
        self.n_bytes = _check_complete(path, remote, whole=whole)
        self.path, self._mono, self._failure = path, mono, soundfile.SoundFileError
        opened: Any = path if isinstance(path, Path) else open_bytes(path, remote)
        self._open: Callable[[], Any] = partial(_open_sound, soundfile.SoundFile, opened)
        try:
            self._file = self._open()
            if self._file.format == "MP3":
                self._file.close()
                self._open = partial(_open_forward_only, soundfile.SoundFile, opened)
                self._file = self._open()
        except (soundfile.SoundFileError, OSError, TypeError) as error:
            unknown = path.name.lower().endswith(".mp3") and "MP3" not in soundfile.available_formats()
            cure = ". libsndfile reads mp3 since version 1.1; install a newer soundfile" if unknown else ""
            raise SourceError(f"{path} must be a readable audio file: {_error_text(error)}{cure}.") from error
        self.container, self.subtype = str(self._file.format), str(self._file.subtype)
        self.rate_hz = float(self._file.samplerate)
        self.seekable = self.container not in ("MP3", "OGG")
        """Whether a slice can be decoded without the frames before it."""
        self.chunks = (_CHUNK_FRAMES,)
        try:
            n_frames = int(self._file.frames) if self.container != "MP3" else self._count_mp3_frames()
            self.stored_shape = (n_frames, int(self._file.channels))
            self.shape = (n_frames, 1 if mono else self.stored_shape[1])
            self._check()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return self.shape[0]

    def _check(self) -> None:
        n_frames, n_channels = self.stored_shape
        if self.container not in _FORMATS:
            raise SourceError(f"{self.path} must be a wav, flac, ogg or mp3 file, got {self.container}; convert it.")
        if not 0 < n_frames < _MAX_FRAMES or not n_channels or self.rate_hz < 1:
            raise SourceError(
                f"{self.path} declares {count(n_frames, 'frame')} of {count(n_channels, 'channel')} at "
                f"{self.rate_hz:.10g} Hz; it is empty, or its length was never written. Encode it again."
            )
        if self.container == "FLAC":  # libsndfile trusts the declared length; decode the last frame to check it
            self._decode(n_frames - 1, n_frames)

    def _count_mp3_frames(self) -> int:
        """Return the number of frames that can be decoded; raise SourceError if some are missing or out of reach."""
        try:
            with open_bytes(self.path, self._remote) as file:
                found = count_frames(file.readall() or b"")
        except ReadError:
            raise
        except OSError as error:
            raise ReadError(f"Could not read {self.path}: {cause(error)}.") from error
        except ValueError as error:
            raise SourceError(f"{self.path} is damaged or truncated: {error}.") from error
        declared = int(self._file.frames)
        if found.declares_length and declared > found.n_audio_frames:
            raise SourceError(
                f"{self.path} is damaged or truncated: it should have {declared} frames, but has "
                f"{found.n_audio_frames}."
            )
        if declared < found.n_audio_frames - _SKIPPED_FRAMES:
            raise SourceError(
                f"{self.path} has about {found.n_audio_frames} frames, of which libsndfile reads {declared}: its bit "
                "rate varies, and it has no Xing header. Encode it again, such as with ffmpeg."
            )
        if found.declares_length:
            return declared
        # Without a header the declared length is an estimate.
        n_frames = 0
        while n_more := len(self._decode_next(_CHUNK_FRAMES)):
            n_frames += n_more
        return n_frames

    def _decode_next(self, n_frames: int) -> NDArray[np.float32]:
        try:
            found: NDArray[np.float32] = self._file.read(n_frames, dtype="float32", always_2d=True)
        except (self._failure, OSError, ValueError) as error:
            raise ReadError(f"Could not read {self.path}: {_error_text(error)}.") from error
        return found

    def __getitem__(self, frames: slice) -> NDArray[np.float32]:
        found = self._decode(frames.start, frames.stop)
        if self._mono and found.shape[1] > 1:
            return np.asarray(found.mean(axis=1, keepdims=True, dtype=np.float64), np.float32)
        return found

    def _decode(self, start: int, stop: int) -> NDArray[np.float32]:
        where = f"frames {start}–{stop - 1} of {self.path}"
        try:
            self._seek(start)
            found: NDArray[np.float32] = self._file.read(stop - start, dtype="float32", always_2d=True)
        except PenstockError:
            raise
        except (self._failure, OSError, ValueError) as error:
            raise ReadError(f"Could not read {where}: {_error_text(error)}.") from error
        if len(found) < stop - start:
            raise ReadError(f"Could not read {where}: got {len(found)} frames; the file is damaged or truncated.")
        return found

    def _seek(self, frame: int) -> None:
        if self._file.tell() == frame:
            return
        if self.seekable:
            self._file.seek(frame)
            return
        if self._file.tell() > frame:
            self._file.close()
            self._file = self._open()
        while (left := frame - self._file.tell()) > 0:
            if not len(self._file.read(min(left, 1 << 16), dtype="float32")):
                raise ReadError(f"Could not read frame {frame} of {self.path}: the file ends before it; it is damaged.")

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()


class AudioTrack:
    """An open audio file at a given sampling rate; its windows are slices of the whole resampled file.

    Parameters
    ----------
    rate_hz
        None: the rate of the file.
    cache_bytes
        Size of the cache of decoded frames, for slices that overlap or lie close together. 0: no cache. None: the
        default of `ChunkedRowReader`.
    """

    def __init__(self, file: AudioFile, rate_hz: float | None, *, cache_bytes: int | None = None) -> None:
        self.file = file
        self.rate_hz, self.n_frames = file.rate_hz, len(file)
        self._blocks = None if cache_bytes == 0 else ChunkedRowReader(file, cache_bytes)
        self._resampler: Resampler | None = None
        if rate_hz is not None and rate_hz != file.rate_hz:
            self._resampler = Resampler(file.rate_hz, rate_hz)
            # The exact output rate, because times are counted in its frames.
            self.rate_hz = float(Fraction(file.rate_hz) * self._resampler.up / self._resampler.down)
            self.n_frames = self._resampler.n_out(len(file))

    def check_item(self, n_frames: int) -> None:
        """Raise SourceError if an item of so many frames would take more memory than one may."""
        check_item_bytes(self.file.path, n_frames, self.file.shape[1], self.file.n_bytes)

    def frames(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return a new array of frames [start, stop), of shape (frames, channels)."""
        if self._resampler is None:
            return np.ascontiguousarray(self._read_stored(start, stop), np.float32)
        return np.ascontiguousarray(self._resampler.rows(self._read_stored, len(self.file), start, stop), np.float32)

    def _read_stored(self, start: int, stop: int) -> NDArray[np.float32]:
        return self.file[start:stop] if self._blocks is None else self._blocks.rows(start, stop)

    def close(self) -> None:
        """Close the file; idempotent."""
        self.file.close()


def check_audio_options(rate_hz: float | None, channels: str) -> None:
    """Raise OptionError if the sampling rate or the handling of channels is invalid."""
    if rate_hz is not None:
        check_positive("rate_hz", rate_hz, "frames per second, such as 16000, or None for the rate of the file")
    if channels not in ("keep", "mono"):
        raise OptionError(f"channels must be one of 'keep', 'mono', got {channels!r}.")


def check_item_bytes(path: object, n_frames: int, n_channels: int, stored_bytes: int) -> None:
    """Raise SourceError if an item of an audio file would take too much memory: a low rate may be resampled to any."""
    item = f"An item of {path} with {count(n_frames, 'frame')} of {count(n_channels, 'channel')}"
    check_expansion(item, n_frames * n_channels * AudioFile.dtype.itemsize, stored_bytes)


def check_positive(name: str, value: Any, unit: str) -> None:
    """Raise OptionError if `value` is no finite number above 0; `unit` completes the message."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise OptionError(f"{name} must be a positive number of {unit}, got {value!r}.")


def _open_sound(file_class: Any, file: Any) -> Any:
    """Open a path, or a file that is open, from its beginning."""
    if not isinstance(file, Path):
        file.seek(0)
    return file_class(file)


def _open_forward_only(file_class: Any, file: Any) -> Any:
    """Open a file in which soundfile does not seek, as it does after every read of a seekable one."""

    class ForwardOnly(file_class):  # type: ignore[misc]  # soundfile has no types
        def seekable(self) -> bool:
            return False

    sound = _open_sound(ForwardOnly, file)
    sound.seek(0)  # as soundfile.read does: after a seek, libsndfile rounds some values of mp3 files otherwise
    return sound


def _error_text(error: Exception) -> str:
    """Return the message of libsndfile, which is empty for some of its errors."""
    text = getattr(error, "error_string", "") or (f"libsndfile error {error.code}" if hasattr(error, "code") else "")
    return str(text or error).rstrip(". ")


def _check_complete(path: Path | Url, remote: RemoteOptions | None, *, whole: bool) -> int:
    """Return the size of a file; raise SourceError if a wav or ogg file is truncated, which libsndfile ignores."""
    with open_bytes(path, remote) as file:
        size = count_bytes(file)
        head = read_range(file, 12, 0)
        try:
            if head[:4] in (b"RIFF", b"RIFX", b"RF64") and head[8:] == b"WAVE":
                _check_riff(file, size, ">" if head[:4] == b"RIFX" else "<")
            elif head[:4] == b"OggS":
                (_check_ogg if whole else _check_ogg_end)(file, size)
        except ReadError:
            raise
        except ValueError as error:
            raise SourceError(f"{path} is damaged or truncated: {error}.") from error
        except OSError as error:
            raise ReadError(f"Could not read {path}: {cause(error)}.") from error
    return size


def _check_riff(file: ByteFile, size: int, order: str) -> None:
    at, long_size = 12, _UNKNOWN
    while len(head := read_range(file, 8, at)) == 8:
        name, n_bytes = head[:4], struct.unpack(f"{order}L", head[4:])[0]
        if name == b"ds64":
            long_size = int.from_bytes(read_range(file, 8, at + 16), "little")
        if name == b"data":
            n_bytes = long_size if n_bytes == _UNKNOWN else n_bytes
            if n_bytes != _UNKNOWN and at + 8 + n_bytes > size:
                raise ValueError(f"it should have {n_bytes} bytes of audio, but has {size - at - 8}")
            return
        at += 8 + n_bytes + n_bytes % 2
    raise ValueError("it has no audio")


def _check_ogg(file: ByteFile, size: int) -> None:
    """Raise ValueError if pages are missing or their checksums do not match."""
    at, number, stream, last = 0, 0, b"", False
    while at < size:
        page = _ogg_page(file, at)
        if last:
            raise ValueError(f"no page of its stream begins at byte {at}")
        if int.from_bytes(page[18:22], "little") != number or (stream and page[14:18] != stream):
            raise ValueError(f"the page at byte {at} is not the next one of the same stream")
        at, number, stream, last = at + len(page), number + 1, page[14:18], bool(page[5] & 4)
    if not last:
        raise ValueError("its last page is missing")


def _check_ogg_end(file: ByteFile, size: int) -> None:
    """Raise ValueError if the file does not end with the last page of a stream."""
    begin = max(0, size - _MAX_PAGE_BYTES)
    for at in _rfind_all(b"OggS", read_range(file, size - begin, begin)):
        try:
            page = _ogg_page(file, begin + at)
        except ValueError:
            continue  # these bytes may occur within a page
        if begin + at + len(page) == size and page[5] & 4:
            return
    raise ValueError("its last page is missing or damaged")


def _rfind_all(word: bytes, content: bytes) -> Iterator[int]:
    """Yield the offsets of `word` in `content`, from the last to the first."""
    at = content.rfind(word)
    while at >= 0:
        yield at
        at = content.rfind(word, 0, at + len(word) - 1)


def _ogg_page(file: ByteFile, at: int) -> bytes:
    """Return the page at an offset; raise ValueError if there is none, or its checksum does not match."""
    head = read_range(file, 27 + 255, at)
    if len(head) < 27 or head[:4] != b"OggS":
        raise ValueError(f"no page of its stream begins at byte {at}")
    n_segments = head[26]
    n_bytes = 27 + n_segments + sum(head[27 : 27 + n_segments])
    page = read_range(file, n_bytes, at)
    if len(page) < n_bytes:
        raise ValueError(f"the page at byte {at} ends {n_bytes - len(page)} bytes too early")
    if _ogg_checksum(page[:22] + bytes(4) + page[26:]) != int.from_bytes(page[22:26], "little"):
        raise ValueError(f"the page at byte {at} does not match its checksum")
    return page


def _ogg_checksum(page: bytes) -> int:
    """Return the CRC-32 of a page: that of zlib, with reversed bits and without inversion."""
    register = zlib.crc32(page.translate(_REVERSED), _UNKNOWN) ^ _UNKNOWN
    return int(f"{register:032b}"[::-1], 2)
