"""Change the code at random, one small change at a time, and list the changes that no test of the folder notices.

`make mutants`, or `python scripts/mutants.py plan core --count 40 --seed 1 --workers 2`. A mutant is a copy of the
package with one operator, constant or condition changed. It is killed if a test fails, and survives if all pass. Not
every survivor is a missing test: some changes cannot be seen from outside (a cache that holds one entry more).
"""

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "penstock"
FOLDERS = ("core", "plan", "shard", "feed")
_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Div: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_TIMEOUT_SECONDS = 300  # a mutant that loops for ever is killed, too


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: which node of which file, and how the line reads afterwards."""

    path: Path
    node: int
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.before}  ->  {self.after}"


def find_mutants(path: Path) -> list[Mutant]:
    """Return every mutant of a file."""
    tree = ast.parse(path.read_text())
    found = []
    for number, node in enumerate(_code_nodes(tree)):
        changed = copy.deepcopy(node)
        if _mutate(changed):
            found.append(Mutant(path, number, getattr(node, "lineno", 0), _show(node), _show(changed)))
    return found


def _show(node: ast.AST) -> str:
    shown = ast.unparse(node.test if isinstance(node, ast.If | ast.While) else node)
    return f"if {shown}" if isinstance(node, ast.If) else shown


def _code_nodes(tree: ast.Module) -> list[ast.AST]:
    """Return the nodes of the code that runs: no annotations, docstrings, messages of errors or `__all__`."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        hidden: list[ast.AST | None] = []
        if isinstance(node, ast.arg | ast.AnnAssign):
            hidden = [node.annotation]
        elif isinstance(node, ast.FunctionDef):
            hidden = [node.returns, *node.decorator_list]
        elif isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
            hidden = [node]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            hidden = [node]
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            hidden = [node]
        skipped.update(below for part in hidden if part is not None for below in ast.walk(part))
    return [node for node in ast.walk(tree) if node not in skipped]


def _mutate(node: ast.AST) -> bool:
    """Change a node in place; return whether there was something to change."""
    match node:
        case ast.Compare() if type(node.ops[0]) in _COMPARISONS:
            node.ops[0] = _COMPARISONS[type(node.ops[0])]()
        case ast.BinOp() | ast.AugAssign() if type(node.op) in _ARITHMETIC:
            node.op = _ARITHMETIC[type(node.op)]()
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.Constant(value=bool()):
            node.value = not node.value
        case ast.Constant(value=int() | float()):
            node.value += 1
        case ast.If() | ast.IfExp() | ast.While():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case _:
            return False
    return True


def is_killed(mutant: Mutant, tests: list[str], workspace: Path) -> bool:
    """Return whether a test fails on a copy of the package with this change."""
    source = workspace / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    tree = ast.parse(mutant.path.read_text())
    _mutate(_code_nodes(tree)[mutant.node])
    (source / mutant.path.relative_to(ROOT / "src")).write_text(ast.unparse(ast.fix_missing_locations(tree)))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:doctest",
        *tests,
    ]
    environment = os.environ | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        shutil.rmtree(workspace)
    return done.returncode != 0


def judge(folder: str, count: int, seed: int, workers: int) -> tuple[int, list[Mutant]]:
    """Try `count` random mutants of a folder; return how many were tried and which survived."""
    every = [mutant for path in sorted((PACKAGE / folder).rglob("*.py")) for mutant in find_mutants(path)]
    chosen = random.Random(seed).sample(every, min(count, len(every)))
    tests = [f"tests/{folder}", *(["tests/laws"] if folder in ("plan", "core", "feed") else [])]
    survived, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(workers) as pool:
        spaces = [Path(temporary) / str(number) for number in range(len(chosen))]
        results = pool.map(lambda pair: is_killed(pair[0], tests, pair[1]), zip(chosen, spaces, strict=True))
        for number, (mutant, killed) in enumerate(zip(chosen, results, strict=True), 1):
            left = (time.monotonic() - began) / number * (len(chosen) - number)
            print(f"\r{folder}: {number} of {len(chosen)}, about {left:.0f} s left   ", end="", file=sys.stderr)
            if not killed:
                survived.append(mutant)
                print(f"\nsurvived  {mutant}", flush=True)
    print(file=sys.stderr)
    return len(chosen), survived


def main() -> None:
    """Judge the folders that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=FOLDERS, help=f"of src/penstock (default: {' '.join(FOLDERS)})")
    parser.add_argument("--count", type=int, default=30, help="mutants per folder (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="which mutants (default 0)")
    parser.add_argument("--workers", type=int, default=2, help="mutants judged at once (default 2)")
    chosen = parser.parse_args()
    rows = []
    for folder in chosen.folders:
        if not (PACKAGE / folder).is_dir():
            parser.error(f"folders must be folders of src/penstock, got {folder!r}.")
        tried, survived = judge(folder, chosen.count, chosen.seed, chosen.workers)
        rows.append(f"{folder:10} {tried - len(survived):4} of {tried} killed")
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()
