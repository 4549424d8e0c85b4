"""Change the code at random, one small change at a time, and list the changes that no test of the folder notices.

`make mutants`, or `python tools/mutants.py plan core --count 40 --seed 1 --workers 2`. A mutant is a copy of the
package with one operator, constant or condition changed. It is killed if a test fails, and survives if all pass. A
survivor needs a test, or, if nobody can notice the change, a line in `EQUIVALENT`. Tests and package are copied first,
so that you may edit them meanwhile.

`--record` keeps the outcome as a line of `bench/results/mutants.jsonl`: the next change of tests is judged by it.
"""

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src/penstock")
RESULTS = ROOT / "bench" / "results" / "mutants.jsonl"
TESTS = {  # besides tests/FOLDER: golden values, and the laws of plans and loaders
    "core": ["plan/test_golden.py"],
    "plan": ["laws/test_plan_*.py"],
    "shard": ["suites/test_damage.py", "suites/test_kills.py"],
    "feed": ["laws/test_loader_*.py", "suites/test_loaders.py"],
    "run": ["suites/test_loaders.py"],
}
SKIPPED = ("__init__.py", "doors.py", "version.py")  # imports on demand, and a string
# Changes that nobody can notice, by file: a pattern of the changed code, and why it makes no difference.
EQUIVALENT: dict[str, dict[str, str]] = {
    "core/chunks.py": {"_CHUNKS_AT_ONCE": "how much is worked out at once"},
    "core/selection.py": {"_AT_ONCE": "how much is worked out at once", "_LIST_NUMBERS": "which form is the fastest"},
    "core/index.py": {
        r"\[:17\]": "the string has 14 bytes",
        "prepend=-2": "any number will do that no chunk has",
    },
    "plan/epoch.py": {
        r"ENDLESS = \d <<": "endless, too, and still below 2**63",
        "_POSITIONS_AT_ONCE": "how much is computed at once",
        r"self\._windows\) >.* \d \* self\.passes\.lanes": "how many windows are remembered",
    },
    "plan/inspect.py": {r"for row in runs\], axis=1": "the mean over the other axis is taken next"},
    "plan/orders.py": {"_SAMPLED_AT_ONCE": "how much is worked out at once"},
    "plan/windows.py": {"_TABLE_ROWS|_CHUNKS_AT_ONCE": "how much is worked out at once, or kept in a table"},
    "plan/plan.py": {"_CACHED_ARRANGEMENTS": "how much is remembered"},
    "shard/codec.py": {"_COPIED_BYTES": "a copy and a view have the same bytes"},
    "shard/compression.py": {r"_READ_BYTES = \d <<": "how much is read at once"},
    "shard/index_tars.py": {r"max\(2, workers\)": "results come in order with any number of threads"},
    "shard/manifest.py": {"initial=1": "a manifest without shards is refused anyway"},
    "shard/pickles/resolve.py": {"_SMALL_BYTES, _TEXT_BYTES": "about how much memory a small object takes"},
    "shard/pickles/unpickler.py": {
        "_CALL_BYTES, _SET_BYTES": "about how much memory a small object takes",
        "_MAX_LETTERS = ": "how much of a name is shown",
    },
    "shard/shard_file.py": {
        "_JOIN_BYTES": "joined or not, the same bytes are written",
        "_MAX_TEMPLATES": "how much is remembered",
        "strict=False": "a sample has as many suffixes as payloads",
        r"self\._handle (> 0|>= 1|= -2)": "0 is the standard input, and a closed file any number below 0",
    },
    "shard/side_index.py": {
        r"(cls|Numbers)\((1, 0|0, 1), ": "not used beside explicit values",
        r"parse_int\(head\['tar_bytes'\], 1\)": "an archive without bytes is refused as well, for its members",
        r">= tar_bytes": "no member reaches the end of an archive, which is zeros",
    },
    "shard/table.py": {
        "_HASHED_BYTES": "how much is hashed at once",
        r"(tar|stored)_bytes (<= 0|< 1)": "an archive without bytes is refused as well, for its items or when read",
        r"lengths < 4": "how many names are compared with '..'",
    },
    "shard/tar.py": {
        r"_READ_BYTES = \d <<": "how much is read at once",
        r"\(-2, b''\)": "no key has a length below 0",
    },
    "shard/verify.py": {
        r"max\(2, workers\)": "results come in order with any number of threads",
        r"'truncated' if size <= ": "asked only if they differ",
    },
    "shard/outputs/write_options.py": {
        r"\(0, 2, 999999|1000001": "any other numbers of these lengths will do",
    },
    "shard/writer.py": {
        "stacklevel=2": "a destructor has no caller",
    },
}

_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Div: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_SHOWN_AROUND = (
    ast.expr, ast.keyword, ast.arguments, ast.comprehension, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return,
)  # fmt: skip
_MAX_SHOWN = 110  # characters
_PATIENCE = 4  # times what the tests take without a change
_MEMORY = Path("/dev/shm")  # where `fsync` takes no time


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: which node of which file, and how the code reads before and after."""

    path: Path
    node: int
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after}"

    @property
    def is_equivalent(self) -> bool:
        """Whether nobody can notice the change."""
        patterns = EQUIVALENT.get(self.path.relative_to(PACKAGE).as_posix(), {})
        return any(re.search(pattern, self.after) for pattern in patterns)


def find_mutants(text: str, path: Path) -> list[Mutant]:
    """Return every mutant of the file `path` with content `text`."""
    tree = ast.parse(text)
    nodes = _code_nodes(tree)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found = []
    for number, node in enumerate(nodes):
        shown = _shown_node(node, parents)
        before, original = _show(shown), copy.copy(node.__dict__)
        if _mutate(node):
            found.append(Mutant(path, number, getattr(node, "lineno", 0), before, _show(shown)))
            node.__dict__.clear()
            node.__dict__.update(original)
    return found


def mutate_text(text: str, mutant: Mutant) -> str:
    """Return the content of the mutant's file with its change."""
    tree = ast.parse(text)
    _mutate(_code_nodes(tree)[mutant.node])
    return ast.unparse(ast.fix_missing_locations(tree))


def _shown_node(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.AST:
    """Return the node to show: the statement or condition around a change, or as much of it as is short enough."""
    parent = parents.get(node)
    is_condition = isinstance(parent, ast.If | ast.While) and node is parent.test
    if parent is None or not (is_condition or isinstance(parent, _SHOWN_AROUND)) or len(_show(parent)) > _MAX_SHOWN:
        return node
    return _shown_node(parent, parents)


def _show(node: ast.AST) -> str:
    if isinstance(node, ast.If | ast.While):
        return f"{'if' if isinstance(node, ast.If) else 'while'} {ast.unparse(node.test)}"
    return ast.unparse(node)


def _code_nodes(tree: ast.Module) -> list[ast.AST]:
    """Return the nodes of the code that runs: no annotations, no messages of errors."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        hidden: list[ast.AST | None] = []
        if isinstance(node, ast.arg | ast.AnnAssign):
            hidden = [node.annotation]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            hidden = [getattr(node, "returns", None), *node.decorator_list]
        elif isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
            hidden = [node]
        skipped.update(below for part in hidden if part is not None for below in ast.walk(part))
    return [node for node in ast.walk(tree) if node not in skipped]


def _mutate(node: ast.AST) -> bool:
    """Change a node in place, by setting its attributes; return whether there was something to change."""
    match node:
        case ast.Compare() if type(node.ops[0]) in _COMPARISONS:
            node.ops = [_COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
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


def run_tests(base: Path, source: Path, tests: list[str], seconds: float | None = None) -> tuple[bool, str]:
    """Run tests against the package in `source`; return whether all pass in time, and what pytest printed."""
    options = ["-q", "-x", "--tb=short", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    writes_bytecode = {} if seconds is None else {"PYTHONDONTWRITEBYTECODE": "1"}
    if seconds is not None:
        options.append(f"--timeout={seconds / _PATIENCE:.0f}")  # no test takes longer than all of them
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, f"--basetemp={source.parent / 'tmp'}", *tests],
        cwd=base,
        env=os.environ | writes_bytecode | {"PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the workers of a test, too
            return False, "too slow"
    return process.returncode == 0, printed


def is_killed(mutant: Mutant, base: Path, tests: list[str], seconds: float) -> bool:
    """Return whether a test fails on a copy of the package with this change."""
    stem = mutant.path.stem
    ordered = sorted(tests, key=lambda test: not Path(test).name.startswith(f"test_{stem}"))  # the likely ones first
    with tempfile.TemporaryDirectory(dir=base.parent) as workspace:
        source = Path(workspace) / "src"
        shutil.copytree(base / "src", source)
        changed = source.parent / mutant.path
        changed.write_text(mutate_text(changed.read_text(), mutant))
        passed, _ = run_tests(base, source, ordered, seconds)
    return not passed


def judge(folder: str, chosen: argparse.Namespace, base: Path) -> tuple[list[Mutant], list[Mutant]]:
    """Try random mutants of a folder; return those that were killed, and those that survived."""
    patterns = [f"{folder}/**/test_*.py", *TESTS.get(folder, [])]
    tests = [str(path.relative_to(base)) for each in patterns for path in sorted((base / "tests").glob(each))]
    began = time.monotonic()
    passed, printed = run_tests(base, base / "src", tests)
    if not passed:
        sys.exit(f"{printed}\n{folder}: its tests must pass before any change, but they fail. Fix them first.")
    seconds = _PATIENCE * max(20.0, time.monotonic() - began)  # a mutant that loops for ever is killed, too
    files = [path for path in sorted((base / PACKAGE / folder).rglob("*.py")) if path.name not in SKIPPED]
    every = [mutant for path in files for mutant in find_mutants(path.read_text(), path.relative_to(base))]
    every = [mutant for mutant in every if re.search(chosen.match, str(mutant))]
    drawn = random.Random(chosen.seed).sample(every, min(chosen.count, len(every)))
    tried = [mutant for mutant in drawn if not mutant.is_equivalent]
    survived, began = [], time.monotonic()
    with ThreadPoolExecutor(chosen.workers) as pool:
        results = pool.map(lambda mutant: is_killed(mutant, base, tests, seconds), tried)
        for number, (mutant, killed) in enumerate(zip(tried, results, strict=True), 1):
            left = (time.monotonic() - began) / number * (len(tried) - number)
            print(f"\r{folder}: {number} of {len(tried)}, about {left:.0f} s left   ", end="", file=sys.stderr)
            if not killed:
                survived.append(mutant)
                print(f"\nsurvived  {mutant}", flush=True)
    print(file=sys.stderr)
    return [mutant for mutant in tried if mutant not in survived], survived


def list_stale_patterns(base: Path) -> list[str]:
    """Return the patterns of `EQUIVALENT` that fit no change of their file, or whose file is gone."""
    stale = []
    for file, patterns in EQUIVALENT.items():
        path = base / PACKAGE / file
        mutants = find_mutants(path.read_text(), PACKAGE / file) if path.is_file() else []
        stale += [f"{file}: {one}" for one in patterns if not any(re.search(one, each.after) for each in mutants)]
    return stale


def record(folder: str, chosen: argparse.Namespace, killed: list[Mutant], survived: list[Mutant]) -> None:
    """Append the outcome to the file of results."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    row = {"commit": commit.stdout.strip(), "folder": folder, "count": chosen.count, "seed": chosen.seed}
    row |= {"killed": [str(each) for each in killed], "survived": [str(each) for each in survived]}
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


def main() -> None:
    """Judge the folders that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=list(TESTS), help=f"of src/penstock (default: {' '.join(TESTS)})")
    parser.add_argument("--count", type=int, default=30, help="mutants per folder (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="which mutants (default 0)")
    parser.add_argument("--workers", type=int, default=2, help="mutants judged at once (default 2)")
    parser.add_argument("--record", action="store_true", help="append the outcome to bench/results/mutants.jsonl")
    parser.add_argument("--match", default="", help="only mutants whose line in the output matches this pattern")
    chosen = parser.parse_args()
    rows = []
    for folder in chosen.folders:
        if not (ROOT / PACKAGE / folder).is_dir():
            parser.error(f"folders must be folders of src/penstock, got {folder!r}.")
        with tempfile.TemporaryDirectory(prefix="mutants_", dir=_MEMORY if _MEMORY.is_dir() else None) as temporary:
            base = Path(temporary) / "base"
            for part in ("src", "tests"):
                shutil.copytree(ROOT / part, base / part)
            shutil.copy2(ROOT / "pyproject.toml", base)
            killed, survived = judge(folder, chosen, base)
        rows.append(f"{folder:10} {len(killed):4} of {len(killed) + len(survived)} killed")
        if chosen.record:
            record(folder, chosen, killed, survived)
    print(*rows, *(f"EQUIVALENT fits nothing: {each}" for each in list_stale_patterns(ROOT)), sep="\n")


if __name__ == "__main__":
    main()
