"""The table of the fault cases: what the campaign counted, the tests, and what other libraries do.

Everything in it comes from stored results, so that a test can tell that the page shows them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.campaign.cases import CASES, Case
from bench.campaign.result import Result, to_json

__all__ = ["PAGE", "RESULTS", "make_tables", "page_with", "read_peers", "read_results", "write_results"]

_HERE = Path(__file__).parent
RESULTS = _HERE / "results.json"
PAGE = _HERE.parents[1] / "docs" / "explanation" / "guarantees.md"
_PEERS = _HERE / "peers" / "results.json"
_BEGIN, _END = "<!-- begin of the fault table: make faults -->", "<!-- end of the fault table -->"
PEERS = {
    "webdataset": "webdataset",
    "litdata": "litdata",
    "streaming": "MosaicML streaming",
    "torchdata": "torchdata",
    "grain": "grain",
}


def read_results(path: Path = RESULTS) -> dict[str, Any]:
    """Return the results of the last campaign."""
    return dict(json.loads(path.read_text())) if path.exists() else {"seed": None, "results": []}


def read_peers(path: Path = _PEERS) -> dict[str, Any]:
    """Return what other libraries do in the same cases."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def write_results(results: Iterable[Result], seed: int, path: Path = RESULTS) -> None:
    """Store results; those of parts that did not run now are kept."""
    found = [to_json(result) for result in results]
    ran = {entry["part"] for entry in found}
    kept = [entry for entry in read_results(path)["results"] if entry["part"] not in ran]
    whole = {"seed": seed, "results": sorted([*kept, *found], key=lambda entry: (entry["part"], entry["what"]))}
    path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


def make_tables(results: Sequence[Mapping[str, Any]], peers: Mapping[str, Any]) -> str:
    """Return the tables in Markdown: the cases, then what the campaign tried."""
    versions = {peer: peers.get(peer, {}).get("version", "") for peer in PEERS}
    head = ["", "case", "Penstock", *(f"{name} {versions[peer]}".strip() for peer, name in PEERS.items())]
    lines = [_row(head), _row(["---"] * len(head))]
    group = ""
    for case in CASES:
        if case.group != group:
            group = case.group
            lines.append(_row([f"**{group}**", *[""] * (len(head) - 1)]))
        found = [_peer_cell(peers.get(peer, {}), case) for peer in PEERS]
        lines.append(_row([str(case.number), case.title, _own_cell(case, results), *found]))
    lines += ["", _row(["what was tried", "cases", "trials", "failures"]), _row(["---", "---", "--:", "--:"])]
    lines += [
        _row([entry["what"], _ranges(entry["cases"]), f"{entry['trials']:,}", str(len(entry["failures"]))])
        for entry in results
    ]
    return "\n".join(lines)


def page_with(text: str, tables: str) -> str:
    """Return the text of a page with the tables between its markers."""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{PAGE} must have the lines {_BEGIN} and {_END}.")
    return f"{before}{_BEGIN}\n\n{tables}\n\n{_END}{after}"


def _own_cell(case: Case, results: Sequence[Mapping[str, Any]]) -> str:
    about = [entry for entry in results if case.number in entry["cases"]]
    trials, failures = (sum(entry["trials"] for entry in about), sum(len(entry["failures"]) for entry in about))
    said = [f"{trials:,} trials, {failures} failures"] if about else []
    files = dict.fromkeys(test.partition("::")[0] for test in case.tests)
    said += [f"[{file.removesuffix('.py')}](../../tests/{file})" for file in files]
    return ", ".join([*said, *([case.why_not] if case.why_not else [])])


def _peer_cell(peer: Mapping[str, Any], case: Case) -> str:
    found = peer.get("cases", {}).get(str(case.number))
    return "" if found is None else str(found["outcome"])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _ranges(numbers: Sequence[int]) -> str:
    """Return "1–3, 7" for 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
