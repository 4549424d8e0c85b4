"""The seeds' documents, readers who try their snippets, and what is in shards and samples that tests write."""

import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["MORE_WORKERS", "Reading", "batch_xs", "code_blocks", "document", "members", "xs"]

MORE_WORKERS = "ignore:This DataLoader will create 4 worker processes"
"""What torch says on a machine of fewer cores."""


def document(seed: str) -> Path:
    """Return where a seed's document lies, verbatim."""
    (path,) = (Path(__file__).parent / "seeds").glob(f"{seed}_*.txt")
    return path


def code_blocks(path: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


class Reading:
    """A reader of a document who tries each snippet in turn, in one session, as one would.

    Each runs in the folder that `place`, given its text, returns: in `folder` where there is no `place`.
    """

    def __init__(
        self,
        document: str,
        snippets: list[str],
        folder: Path,
        names: dict[str, Any],
        place: Callable[[str], Path] | None = None,
    ) -> None:
        self.folder, self.names = folder, names
        self.done = 0
        self.after: dict[int, dict[str, Any]] = {}
        """The names that there were after each snippet."""
        self._document, self._snippets, self._place = document, snippets, place

    def run(self, number: int) -> dict[str, Any]:
        """Run the snippets up to `number` that were not run yet; return the names that there were after it."""
        while self.done <= number:
            block, self.done = self.done, self.done + 1
            snippet = self._snippets[block]
            before = Path.cwd()
            os.chdir(self.folder if self._place is None else self._place(snippet))
            try:
                exec(compile(snippet, f"{self._document}, block {block}", "exec"), self.names)
            finally:
                os.chdir(before)
            self.after[block] = dict(self.names)
        return self.after[number]


def members(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


def xs(samples: Any) -> list[int]:
    return [int(sample["x"]) for sample in samples]


def batch_xs(batches: Any) -> list[list[int]]:
    return [batch["x"].tolist() for batch in batches]
