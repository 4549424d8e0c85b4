"""Member names, `KEY.FIELD.EXTENSION`: unambiguous for every item and every field.

The webdataset library takes everything up to the first dot as the key and ignores case in the rest. Sample ids may
still contain dots and slashes: they are percent-encoded in the key.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

from penstock.core.errors import OptionError
from penstock.shard.tar import MAX_NAME

__all__ = [
    "KEY",
    "automatic_key",
    "check_fields",
    "check_name_length",
    "encode_key",
    "field_name",
    "field_names",
    "fold_extension",
    "has_extension",
    "holds_file",
    "is_automatic",
    "member_suffix",
    "split_name",
    "stored_extension",
]

KEY = "__key__"
"""The field that holds the key of an item: the part of its members' names that they share."""

_ENCODED = {ord(letter): f"%{ord(letter):02X}" for letter in "%./\\"} | {
    code: f"%{code:02X}" for code in (*range(32), 127)
}
_PREFIX = "sample_"
_DECODABLE = {"npy", "npz", "json", "jsn", "txt", "text", "pyd", "pkl", "pickle", "bin", "cls", "pt", "pth"}
_APPENDED = {"npy", "pyd", "txt", "json", "bin"}  # extensions that the writer adds to the name of a field
_OF_FILES = {
    *("jpg", "jpeg", "jpe", "jfif", "png", "webp", "bmp", "gif", "tif", "tiff", "jp2", "ppm", "pgm", "pbm", "pnm"),
    *("wav", "flac", "ogg", "opus", "mp3", "m4a", "aac", "aif", "aiff"),
    *("mp4", "m4v", "mov", "avi", "mkv", "webm", "mpg", "mpeg"),
    *("mp", "msg", "msgpack"),
    *("txt", "json"),
}


def automatic_key(number: int) -> str:
    """Return the key of a sample without an id."""
    return f"{_PREFIX}{number:09d}"


def is_automatic(sample_id: str) -> bool:
    """Return whether an id has the form of automatic keys."""
    return (
        sample_id.startswith(_PREFIX) and len(sample_id) >= len(_PREFIX) + 9 and sample_id[len(_PREFIX) :].isdecimal()
    )


def encode_key(sample_id: str) -> str:
    """Return the key of a sample id; different ids have different keys.

    Examples
    --------
    >>> encode_key("sub-01.ses-2/run 1")
    'sub-01%2Eses-2%2Frun 1'
    """
    if not isinstance(sample_id, str) or not sample_id:
        raise OptionError(f"sample_id must be a non-empty string such as 'sub-01_trial-7', got {sample_id!r}.")
    try:
        sample_id.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"sample_id must be valid Unicode, got {sample_id!r}: {error}.") from error
    return sample_id.translate(_ENCODED)


def check_fields(names: Iterable[str], reserved: str) -> None:
    """Raise OptionError if a field name cannot be part of a member name, or if two would be the same."""
    lowered: dict[str, str] = {}
    for name in names:
        if not isinstance(name, str) or not name or not name.isprintable():
            raise OptionError(f"A field name must be a non-empty string of printable characters, got {name!r}.")
        if name.lower() == reserved or name.startswith("__"):
            raise OptionError(
                f"The field name {name!r} is reserved. Pass metadata of a sample as the keyword `metadata`."
            )
        if "/" in name or "\\" in name or name.startswith(".") or name.endswith(".") or ".." in name:
            raise OptionError(
                f"A field name must have no slash, and dots only inside, such as 'lfp.left'; got {name!r}."
            )
        other = lowered.setdefault(name.lower(), name)
        if other != name:
            raise OptionError(
                f"Field names must differ in more than case, got {other!r} and {name!r}: the webdataset library "
                "merges them. Rename one."
            )


def check_name_length(key: str, suffixes: tuple[str, ...]) -> None:
    """Raise OptionError if a member name does not fit into a tar header."""
    length = len(key.encode()) + 1
    if length + _longest_suffix_bytes(suffixes) <= MAX_NAME:
        return
    for suffix in suffixes:
        if length + len(suffix.encode()) > MAX_NAME:
            raise OptionError(
                f"A member name must have at most {MAX_NAME} bytes, got '{key}.{suffix}' with "
                f"{length + len(suffix.encode())}. Use a shorter sample id or field name."
            )


def stored_extension(name: str) -> str:
    """Return the extension of a field of bytes: that of its name if files have it, such as `png`; `bin` otherwise."""
    extension = name.rpartition(".")[2].lower()
    return extension if extension in _OF_FILES else "bin"


def holds_file(name: str) -> bool:
    """Return whether a field of bytes holds a file that readers decode by its extension, such as an image."""
    return stored_extension(name) not in ("bin", "txt", "json")


def has_extension(name: str) -> bool:
    """Return whether a name ends, as that of a file does, in an extension under which payloads are stored."""
    return name.rpartition(".")[2].lower() in _APPENDED | _OF_FILES


def member_suffix(name: str, extension: str) -> str:
    """Return the part of a member's name after the key: `name` with its extension, unless it has that already.

    Examples
    --------
    >>> member_suffix("spikes", "npy"), member_suffix("left.png", "png"), member_suffix("txt", "txt")
    ('spikes.npy', 'left.png', 'txt')
    """
    stem, _, last = name.rpartition(".")
    # `field_name` must return the name: a stem with an extension that the writer adds would lose it.
    is_complete = last.lower() == extension and not (stem and extension in _APPENDED)
    return name if is_complete else f"{name}.{extension}"


def field_name(suffix: str) -> str:
    """Return the field that the writer stored under a suffix; the inverse of `member_suffix`."""
    stem, _, extension = suffix.rpartition(".")
    return stem if stem and extension in _APPENDED else suffix


@lru_cache(maxsize=16)
def _longest_suffix_bytes(suffixes: tuple[str, ...]) -> int:
    return max(len(suffix.encode()) for suffix in suffixes)


def split_name(name: str) -> tuple[str, str]:
    """Split a member name into key and suffix as the webdataset library does; ('', '') if it has none."""
    folder, slash, last = name.rpartition("/")
    key, dot, suffix = last.partition(".")
    return (f"{folder}{slash}{key}", suffix) if key and dot and suffix else ("", "")


def fold_extension(suffix: str) -> str:
    """Return a suffix with its extension in lower case: `JPG` and `jpg` are one field.

    Examples
    --------
    >>> fold_extension("JPG"), fold_extension("LFP.NPY"), fold_extension("x.Txt.GZ")
    ('jpg', 'LFP.npy', 'x.txt.gz')
    """
    parts = suffix.split(".")
    n_folded = 2 if parts[-1].lower() == "gz" else 1
    return ".".join([*parts[:-n_folded], *(part.lower() for part in parts[-n_folded:])])


def field_names(suffixes: Iterable[str]) -> Mapping[str, str]:
    """Return the field name of each suffix: without the extension, unless two fields would then share a name.

    Examples
    --------
    >>> field_names(["spikes.npy", "jpg", "left.png", "left.json"])
    {'spikes.npy': 'spikes', 'jpg': 'jpg', 'left.png': 'left.png', 'left.json': 'left'}
    """
    suffixes = list(suffixes)
    short = {suffix: _strip_extension(suffix) for suffix in suffixes}
    counts = Counter(short.values())
    return {suffix: name if counts[name] == 1 else suffix for suffix, name in short.items()}


def _strip_extension(suffix: str) -> str:
    name, _, extension = suffix.rpartition(".")
    return name if name and extension.lower() in _DECODABLE else suffix
