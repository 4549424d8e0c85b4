"""Fuzz parsers: `python -m bench.campaign.fuzz [TARGET ...]`. With `--inputs 0`, only the corpus is replayed."""

import argparse
import base64
import hashlib
import json
import os
import sys
import time
from pathlib import Path

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ["PENSTOCK_MAX_ITEM_BYTES"] = str(1 << 24)  # far below the memory that a process may take

from bench.campaign.fuzz.probe import Finding  # noqa: E402
from bench.campaign.fuzz.supervise import Outcome, fuzz_targets  # noqa: E402
from bench.campaign.fuzz.targets.all import GROUPS, TARGETS  # noqa: E402

CORPUS = Path(__file__).parents[3] / "tests" / "corpus"


def main() -> int:
    """Run from the command line; the exit code is 1 if there is a finding."""
    parser = argparse.ArgumentParser(prog="python -m bench.campaign.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"a parser: {', '.join(TARGETS)} (default: all)")
    parser.add_argument("--inputs", type=int, default=200_000, help="random ones, of all targets (default: 200000)")
    parser.add_argument("--seconds", type=float, default=480, help="stop after this time (default: 480)")
    parser.add_argument("--seed", type=int, default=0, help="of the random changes (default: 0)")
    parser.add_argument("--processes", type=int, default=2, help="targets at once (default: 2)")
    parser.add_argument("--light", action="store_true", help="leave out parsers whose imports take seconds")
    parser.add_argument("--save", action="store_true", help="write the input of each finding into tests/corpus")
    parser.add_argument("--json", type=Path, help="write counts and findings into this file")
    given = parser.parse_args()
    unknown = sorted(set(given.targets) - set(TARGETS))
    if unknown:
        parser.error(f"TARGET must be one of {', '.join(TARGETS)}, got {unknown[0]!r}")
    strays = sorted(path.name for path in CORPUS.iterdir() if path.is_dir() and path.name not in TARGETS)
    if strays:
        parser.error(f"every folder of tests/corpus must be called like a TARGET, got {', '.join(strays)}")
    chosen = [target for name in given.targets or TARGETS if not ((target := TARGETS[name]).is_heavy and given.light)]
    total = sum(target.weight for target in chosen)
    outcomes = fuzz_targets(
        [(target, round(given.inputs * target.weight / total)) for target in chosen],
        seed=given.seed,
        deadline=time.monotonic() + given.seconds,
        processes=given.processes,
        corpus=_read_corpus,
        say=lambda line: print(line, flush=True),
    )
    findings = [finding for outcome in outcomes for finding in outcome.findings.values()]
    for finding in findings:
        _show(finding)
        if given.save:
            _save(finding)
    n_inputs = sum(outcome.n_inputs for outcome in outcomes)
    print(f"\n{n_inputs:,} inputs to {len(outcomes)} parsers, {len(findings)} findings.")
    if given.json is not None:
        given.json.write_text(json.dumps(_to_json(outcomes), indent=1))
    return 1 if findings else 0


def _read_corpus(target: str) -> list[tuple[str, bytes]]:
    """Return the corpus files of a target, with their names."""
    files = sorted(path for path in (CORPUS / target).glob("*") if path.is_file())
    return [(f"tests/corpus/{target}/{path.name}", path.read_bytes()) for path in files]


def _show(finding: Finding) -> None:
    shown = finding.content if len(finding.content) <= 200 else finding.content[:200] + b" ..."
    print(f"\n{finding.target}: {finding.kind}: {finding.reason}{finding.label and f' ({finding.label})'}")
    print(f"  input ({len(finding.content)} bytes): {shown!r}")
    print("  " + finding.details.replace("\n", "\n  "))


def _save(finding: Finding) -> None:
    """Store the input under a name that says what happened; a better name says what is wrong with the input."""
    folder = CORPUS / finding.target
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(finding.content).hexdigest()[:8]
    (folder / f"{finding.kind}-{digest}.bin").write_bytes(finding.content)


def _to_json(outcomes: list[Outcome]) -> list[dict[str, object]]:
    """Return what came of each group of targets."""
    groups = []
    for what, (cases, targets) in GROUPS.items():
        names = {target.name for target in targets}
        here = [outcome for outcome in outcomes if outcome.target in names]
        if here:
            groups.append({"what": what, "cases": cases, "targets": [_describe(outcome) for outcome in here]})
    return groups


def _describe(outcome: Outcome) -> dict[str, object]:
    return {
        "target": outcome.target,
        "inputs": outcome.n_inputs,
        "lines": outcome.n_lines,
        "seconds": round(outcome.seconds, 3),
        "failing": outcome.n_failing,
        "findings": [
            {"kind": one.kind, "reason": one.reason, "input": base64.b64encode(one.content).decode()}
            for one in outcome.findings.values()
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
