"""How members are named: `KEY.FIELD.EXTENSION`, so that no two items and no two fields can be taken for one.

The webdataset library takes everything up to the first dot for the key, and compares what follows without regard to
case. A sample id may hold dots and slashes all the same: they are percent-encoded in the key.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

from penstock.core.errors import OptionError
from penstock.shard.tar import MAX_NAME

__all__ = ["automatic_key", "check_fields", "check_name_length", "field_names", "encode_key", "split_name"]

_ENCODED = {ord(letter): f"%{ord(letter):02X}" for letter in "%./\\"} | {
    code: f"%{code:02X}" for code in (*range(32), 127)
}
_PREFIX = "sample_"
_DECODABLE = {"npy", "npz", "json", "jsn", "txt", "text", "pyd", "pkl", "pickle", "bin", "cls", "pt", "pth"}


def automatic_key(number: int) -> str:
    """Return the key of a sample that was given no id."""
    return f"{_PREFIX}{number:09d}"


def encode_key(sample_id: str) -> str:
    """Return the key of a sample id; different ids have different keys.

    Examples
    --------
    >>> encode_key("sub-01.ses-2/run 1")
    'sub-01%2Eses-2%2Frun 1'
    """
    if not isinstance(sample_id, str) or not sample_id:
        raise OptionError(f"sample_id={sample_id!r}; use a string that is not empty, such as 'sub-01_trial-7'.")
    try:
        sample_id.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"sample_id={sample_id!r} is no valid text: {error}.") from error
    return sample_id.translate(_ENCODED)


def check_fields(names: Iterable[str], reserved: str) -> None:
    """Raise OptionError where a field cannot be the name of a member, or where two of them would be one."""
    lowered: dict[str, str] = {}
    for name in names:
        if not isinstance(name, str) or not name or not name.isprintable():
            raise OptionError(f"{name!r} cannot name a field; use a string of printable characters.")
        if name.lower() == reserved or name.startswith("__"):
            raise OptionError(
                f"The field name {name!r} is taken; the keyword `metadata` holds what is known of a sample."
            )
        if "/" in name or "\\" in name or name.startswith(".") or name.endswith(".") or ".." in name:
            raise OptionError(f"The field name {name!r} has a slash, or a dot at its end; use for example 'lfp.left'.")
        other = lowered.setdefault(name.lower(), name)
        if other != name:
            raise OptionError(
                f"The fields {other!r} and {name!r} differ in case only; the webdataset library merges them."
            )


def check_name_length(key: str, suffixes: tuple[str, ...]) -> None:
    """Raise OptionError where a member's name would not fit into a tar header."""
    length = len(key.encode()) + 1
    if length + _longest(suffixes) <= MAX_NAME:
        return
    for suffix in suffixes:
        if length + len(suffix.encode()) > MAX_NAME:
            raise OptionError(
                f"The member name '{key}.{suffix}' has {length + len(suffix.encode())} bytes; a tar header holds "
                f"{MAX_NAME}. Use a shorter sample id or field name."
            )


@lru_cache(maxsize=16)
def _longest(suffixes: tuple[str, ...]) -> int:
    return max(len(suffix.encode()) for suffix in suffixes)


def split_name(name: str) -> tuple[str, str]:
    """Return the key and the suffix of a member's name, as the webdataset library splits it; ('', '') for none."""
    folder, slash, last = name.rpartition("/")
    key, dot, suffix = last.partition(".")
    return (f"{folder}{slash}{key}", suffix) if key and dot and suffix else ("", "")


def field_names(suffixes: Iterable[str]) -> Mapping[str, str]:
    """Return the field of each suffix: without the extension, unless two fields would then have one name.

    Examples
    --------
    >>> field_names(["spikes.npy", "jpg", "left.png", "left.json"])
    {'spikes.npy': 'spikes', 'jpg': 'jpg', 'left.png': 'left.png', 'left.json': 'left'}
    """
    suffixes = list(suffixes)
    short = {suffix: _without_extension(suffix) for suffix in suffixes}
    counts = Counter(short.values())
    return {suffix: name if counts[name] == 1 else suffix for suffix, name in short.items()}


def _without_extension(suffix: str) -> str:
    name, _, extension = suffix.rpartition(".")
    return name if name and extension.lower() in _DECODABLE else suffix
