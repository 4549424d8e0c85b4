"""What each extra of Penstock brings, and how large that is where this runs: `python tools/extra_sizes.py`.

Prints the table of docs/how-to/install.md, from the packages that are installed here, without compiled files of Python.
An extra of which a package is missing here is left out.
"""

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def find_packages(requirements: list[str]) -> set[str]:
    """Return the packages that pip would bring: these, what they need, and so on; CUDA is not among them."""
    found: set[str] = set()
    waiting = [(Requirement(text), "") for text in requirements]
    seen = set()
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (requirement.marker and not requirement.marker.evaluate({"extra": extra})) or (
            str(requirement),
            extra,
        ) in seen:
            continue
        seen.add((str(requirement), extra))
        try:
            inner = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:
            if requirement.marker is None and not extra:
                raise
            continue
        found.add(name)
        waiting += [(Requirement(text), each) for text in inner for each in ("", *requirement.extras)]
    return found


def measure(name: str) -> int:
    """Return the bytes of the files of a package."""
    files = importlib.metadata.files(name) or []
    paths = {Path(str(file.locate())) for file in files if "__pycache__" not in file.parts}
    return sum(path.stat().st_size for path in paths if path.is_file())


def main() -> None:
    """Print the table."""
    base = find_packages(PROJECT["dependencies"])
    sizes = {name: measure(name) for name in base}
    others = base - {"torch"}
    rows = [
        ("`torch` (CPU)", sizes["torch"], ""),
        ("the other packages of Penstock itself", sum(sizes[name] for name in others), _describe(others, sizes)),
    ]
    for extra in sorted(set(EXTRAS) - {"all", "dev", "docs", "s3"}):
        try:
            more = find_packages(EXTRAS[extra]) - base - {"penstock"}
        except importlib.metadata.PackageNotFoundError as error:
            print(f"<!-- {extra} is left out: {error} -->")
            continue
        sizes |= {name: measure(name) for name in more}
        rows.append((f"`penstock[{extra}]`", sum(sizes[name] for name in more), _describe(more, sizes)))
    print("| installs | MB | packages, the largest first |\n|---|---|---|")
    for what, n_bytes, packages in rows:
        print(f"| {what} | {n_bytes / 1e6:.1f} | {packages} |")


def _describe(names: set[str], sizes: dict[str, int]) -> str:
    ordered = sorted(names, key=lambda name: -sizes[name])
    shown = [re.sub(r"[^\w.-]", "", name) for name in ordered[:4]]
    return ", ".join(shown) + (f" and {len(ordered) - 4} more" if len(ordered) > 4 else "")


if __name__ == "__main__":
    main()
