"""Whether an mp3 file is complete, and whether libsndfile knows its length.

An mp3 file is a row of frames, each with a header that says how long it is. libsndfile reads a truncated file as far as
it goes, and a file of varying bit rate without a Xing header only as far as the bit rate of its first frame suggests.
So the frames are counted here.
"""

from dataclasses import dataclass

__all__ = ["Mp3Frames", "count_frames"]

_BITRATES = {  # kbit/s of layer III by index, for MPEG 1, and for MPEG 2 and 2.5
    True: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    False: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}  # MPEG 1, 2 and 2.5
_LAYER_3 = 1


@dataclass(frozen=True, slots=True)
class Mp3Frames:
    """What the frame headers of an mp3 file say."""

    n_audio_frames: int
    """Number of samples per channel, with those that a decoder leaves out at the beginning and the end."""

    declares_length: bool
    """Whether the first frame is a Xing header, which declares the exact length."""


def count_frames(content: bytes) -> Mp3Frames:
    """Walk through the frames of an mp3 file; raise ValueError if it is damaged or truncated."""
    at = _skip_tag(content)
    found, declares_length, total = 0, False, 0
    while (frame := _parse_header(content, at)) is not None:
        length, n_samples = frame
        if at + length > len(content):
            raise ValueError(f"the frame at byte {at} ends {at + length - len(content)} bytes too early")
        if not found:
            head = content[at : at + length]
            declares_length = b"Xing" in head[:64] or b"Info" in head[:64]
        total += 0 if not found and declares_length else n_samples
        at, found = at + length, found + 1
    rest = content[at:]
    if not found or not (rest[:3] == b"TAG" or rest[:8] in (b"APETAGEX", b"LYRICSBE") or not rest.strip(b"\0")):
        raise ValueError(f"no frame of layer III begins at byte {at}")
    return Mp3Frames(total, declares_length)


def _skip_tag(content: bytes) -> int:
    """Return where the frames begin, after ID3 tags of version 2."""
    at = 0
    while content[at : at + 3] == b"ID3" and len(content) >= at + 10:
        # Seven bits of each byte count.
        size = 0
        for byte in content[at + 6 : at + 10]:
            size = size << 7 | byte & 0x7F
        at += 10 + size
    return at


def _parse_header(content: bytes, at: int) -> tuple[int, int] | None:
    """Return the bytes and samples of the frame at an offset; None if there is none."""
    head = content[at : at + 4]
    if len(head) < 4 or head[0] != 0xFF or head[1] < 0xE0:
        return None
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    bitrate, rate, padding = head[2] >> 4, head[2] >> 2 & 3, head[2] >> 1 & 1
    if version not in _RATES or layer != _LAYER_3 or bitrate in (0, 15) or rate == 3:
        return None
    is_first_version = version == 3
    n_samples = 1152 if is_first_version else 576
    return n_samples // 8 * 1000 * _BITRATES[is_first_version][bitrate] // _RATES[version][rate] + padding, n_samples
