"""Words of messages: a number with its noun, the nearest name, and a path that is named once."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

__all__ = ["about_unread", "cause", "count", "did_you_mean", "list_some", "name_once"]

_OTHER_FORMATS = "docs/how-to/convert-recordings.md"
_SIBILANTS = ("s", "x", "tch", "sh")  # and not "ch": epochs


def count(number: int, noun: str) -> str:
    """Return a number with its noun in the right form.

    Examples
    --------
    >>> count(1, "shard"), count(1200, "item"), count(2, "batch"), count(0, "modality"), count(3, "array")
    ('1 shard', '1,200 items', '2 batches', '0 modalities', '3 arrays')
    """
    return f"{number:,} {noun if number == 1 else _plural(noun)}"


def _plural(noun: str) -> str:
    if noun.endswith(_SIBILANTS):
        return f"{noun}es"
    is_ies = noun.endswith("y") and noun[-2:-1] not in "aeou"  # modalities, but arrays
    return f"{noun[:-1]}ies" if is_ies else f"{noun}s"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return a question, after a space, that names the nearest of the names that exist; nothing if none is near.

    Examples
    --------
    >>> did_you_mean("subjct", ["quality", "subject"]), did_you_mean("x", ["quality"])
    (" Did you mean 'subject'?", '')
    """
    near = get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def list_some(names: Sequence[str], noun: str) -> str:
    """Return a single name, or the number of names and the first three.

    Examples
    --------
    >>> list_some(["a.wav"], "input"), list_some(["a.wav", "b.wav", "c.wav", "d.wav"], "input")
    ('a.wav', '4 inputs (a.wav, b.wav, c.wav, …)')
    """
    if len(names) == 1:
        return names[0]
    return f"{count(len(names), noun)} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"


def name_once(path: object, reason: str) -> str:
    """Return a line about a file: its path and the reason, or the reason alone if that names the file.

    Examples
    --------
    >>> name_once("a.npy", "it is empty"), name_once("a.npy", "Could not read a.npy: it is empty.")
    ('a.npy: it is empty', 'Could not read a.npy: it is empty.')
    """
    return reason if str(path) in reason else f"{path}: {reason}"


def cause(error: BaseException) -> str:
    """Return what an error says, without the path that an error of the operating system repeats.

    Examples
    --------
    >>> cause(FileNotFoundError(2, "No such file or directory", "a.npy")), cause(ValueError("too short"))
    ('No such file or directory', 'too short')
    """
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def about_unread(path: object) -> str:
    """Return what to do about a file of a format that is not read.

    Examples
    --------
    >>> about_unread("a.edf")
    'Penstock does not read .edf files, got a.edf: write a function of five lines (docs/how-to/convert-recordings.md).'
    """
    stem, _, suffix = str(path).rpartition("/")[2].rpartition(".")
    if suffix in ("gz", "bz2", "xz", "zip") and "." in stem:
        suffix = f"{stem.rpartition('.')[2]}.{suffix}"
    return f"Penstock does not read .{suffix} files, got {path}: write a function of five lines ({_OTHER_FORMATS})."
