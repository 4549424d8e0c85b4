"""What to say where a manifest is missing: what is there instead, and what makes a dataset of it."""

from itertools import islice
from pathlib import Path

from penstock.core.errors import ReadError, SourceError
from penstock.core.text import cause, count
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.files.staging import UNFINISHED, WRITING, describe_unfinished
from penstock.shard.places.archives import ARCHIVE

__all__ = ["INDEXED", "explain_missing_path", "explain_missing_url"]

INDEXED = ".metadata.json"
"""The name of the manifest of an archive, or of a pattern of archives, is theirs and this."""

_MOST_LISTED = 1000  # names at a URL: a whole bucket may have millions


def explain_missing_url(folder: RemoteFolder, name: str) -> SourceError:
    """Return the error for a URL without a manifest."""
    if name.endswith(INDEXED):
        archives = folder.url / name.removesuffix(INDEXED)
        return SourceError(
            f"{archives} has no index: there is no {name} beside it. Make one: `penstock index '{archives}'`, which "
            "puts it there, or into a folder of this machine."
        )
    try:
        names = sorted(info.key for info in islice(folder.iter_objects(), _MOST_LISTED))
    except ReadError as error:
        # Of a bucket: it does not exist, or must not be listed. A web server lists nothing.
        reason = f"If there are tar archives, index them: `penstock index '{folder.url}/NAME-{{000000..000009}}.tar'`."
        return SourceError(f"No dataset at {folder.url}: there is no {name}. {reason if folder.url.is_http else error}")
    return SourceError(_describe_names(folder, name, names))


def _describe_names(folder: RemoteFolder, name: str, names: list[str]) -> str:
    """Return what is wrong, given what is at a URL and below it."""
    url = folder.url
    archives = [each for each in names if "/" not in each and _is_archive(each)]
    below = next((each.rpartition("/")[0] for each in names if each.endswith(f"/{name}")), None)
    if f"{WRITING}/options.json" in names:
        return f"No dataset at {url}: {UNFINISHED}"
    if not names:
        hint = " Names are taken as they are: write a space, not %20." if "%" in url.path else ""
        return f"No shards found: there is nothing at {url}.{hint}"
    if archives:
        return (
            f"No manifest {name} at {url}, which holds {count(len(archives), 'archive')} ({archives[0]}"
            f"{', …' if archives[1:] else ''}). Run `penstock index {url}` to make one."
        )
    if below is not None:
        return f"No shards found at {url}: the datasets are below it, such as {url / below}."
    return f"No shards found at {url}: it has neither a manifest ({name}) nor tar archives."


def explain_missing_path(path: Path) -> SourceError:
    """Return the error for a path without a manifest."""
    folder = path.parent
    try:
        if not folder.is_dir():
            return SourceError(f"No shards found: the folder {folder} does not exist.")
        names = sorted(entry.name for entry in folder.iterdir())
        unfinished = describe_unfinished(folder)
        parts = [name for name in names if (folder / name / path.name).is_file()]
        lost = [name for name in names if (folder / name / WRITING).is_dir() and name not in parts]
    except OSError as error:
        return SourceError(f"No shards found: the folder {folder} cannot be read: {cause(error)}.")
    archives = [name for name in names if _is_archive(name)]
    if unfinished:
        return SourceError(f"No dataset in {folder}: {unfinished}")
    if archives:
        return SourceError(
            f"No manifest {path.name} in {folder}, which holds {count(len(archives), 'archive')} ({archives[0]}"
            f"{', …' if archives[1:] else ''}). Run `penstock index {folder}` to make one."
        )
    if parts:
        more = f" Not published yet: {', '.join(lost)}; convert again with resume=True." if lost else ""
        return SourceError(
            f"No shards found in {folder}: the datasets are below it, such as {folder / parts[0]}.{more}"
        )
    return SourceError(f"No shards found in {folder}: it has neither a manifest ({path.name}) nor tar archives.")


def _is_archive(name: str) -> bool:
    return ARCHIVE.search(name) is not None
