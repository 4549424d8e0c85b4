"""Check names that a user wrote: the names of sources and of fields."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from penstock.core.errors import OptionError, SourceError

__all__ = ["check_names", "check_sources"]


def check_names(what: str, given: Iterable[Any], known: Iterable[str], *, error: type[OptionError]) -> None:
    """Raise `error` for the first of `given` that is not known; it names the nearest known one."""
    known = list(known)
    for name in given:
        if name not in known:
            near = get_close_matches(str(name), known, n=1, cutoff=0.5)
            cure = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(map(repr, known))}."
            raise error(f"{what} names {name!r}, which is not there; {cure}")


def check_sources(sources: Any) -> None:
    """Raise SourceError if these are not one or more sources with items, by name."""
    if not isinstance(sources, Mapping) or not sources:
        raise SourceError(
            f"sources must be sources by name, such as {{'a': source_a, 'b': source_b}}, got {sources!r}."
        )
    for name, source in sources.items():
        if not isinstance(name, str) or not name:
            raise SourceError(f"The name of a source must be a string, got {name!r}.")
        if isinstance(source, type) or not all(hasattr(source, member) for member in ("index", "fields", "take")):
            raise SourceError(
                f"Source {name!r} must be a source, such as ArraySource or TarSource, got {type(source).__name__}. "
                "DatasetSource makes one of a torch dataset."
            )
        if not len(source.index):
            raise SourceError(f"Source {name!r} must have at least one item, got {source!r} with none; leave it out.")
