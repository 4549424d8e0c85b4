"""Tell the story and check it: `python -m examples.demo`, or `make demo`.

Each training is a separate process, so that the kill is real and nothing survives it but files.
"""

import argparse
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

_PLACES = ("TMPDIR", "MPLCONFIGDIR", "XDG_CACHE_HOME")  # where torch, matplotlib and pynwb write caches
_WIDTH, _INDENT = 100, "   "


def main() -> int:
    """Run the demo; return 1 if something differs from what Penstock guarantees."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the files here, in a new or empty folder")
    parser.add_argument("--quick", action="store_true", help="use small sizes")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the data, the model and the order")
    options = parser.parse_args()
    missing = [name for name in ("pynwb", "h5py", "scipy", "matplotlib") if find_spec(name) is None]
    if missing:
        parser.error(f"needs {' and '.join(missing)}; install them with: pip install 'penstock[nwb,report]'")
    if options.seed < 0:
        parser.error(f"argument --seed: must be >= 0, got {options.seed}")
    keep = options.keep and options.keep.absolute()
    if keep and keep.exists() and any(keep.iterdir()):
        parser.error(f"argument --keep: must be a new or empty folder, got {keep}")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    logging.getLogger("penstock").setLevel(logging.ERROR)  # the story says what matters
    began, folder = time.monotonic(), keep or Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    owner = os.getpid()
    try:
        (folder / "caches").mkdir(parents=True)
        os.environ |= {**dict.fromkeys(_PLACES, str(folder / "caches")), "MPLBACKEND": "agg"}
        checks = _tell(folder, options.seed, quick=options.quick)
    finally:
        if os.getpid() == owner:  # not in a worker that a signal ends
            shutil.rmtree(folder / "caches" if keep else folder, ignore_errors=True)
    refused = [check.what for check in checks if not check.holds]
    outcome = f"FAILED: {'; '.join(refused)}." if refused else f"All {len(checks)} checks passed."
    where = f"The report is {keep / 'report.html'}, next to all other files." if keep else "Keep the files: --keep DIR."
    print(f"\n{outcome} It took {time.monotonic() - began:.0f} s.\n{where}")
    return bool(refused)


def _stop(number: int, _: object) -> None:
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)  # once: nothing interrupts the removal of the files
    sys.exit(128 + number)


def _tell(folder: Path, seed: int, *, quick: bool) -> list:  # noqa: PLR0915  # one story
    from examples.demo.checks import Check, check_damage, check_decoding, compare, copy_damaged
    from examples.demo.recordings import list_sessions, write_recording
    from examples.demo.settings import BIN_MS, BINS, Settings
    from penstock import convert_to_shards, generator_for
    from penstock.convert import ConvertOptions, LocalEngine, NWBOptions, ReadOptions, Split
    from penstock.shard import WriteOptions, verify_shards
    from penstock.shard.manifest import Manifest

    checks: list[Check] = []

    def check(found: Iterable[Check]) -> None:
        for each in found:
            checks.append(each)
            print(f"{_INDENT}{'yes' if each.holds else 'NO':<4} {each.what:<37} {each.detail}", flush=True)

    whole = Settings(str(folder), seed)
    whole = whole.quick() if quick else whole
    _say("Penstock, from recordings to a trained decoder. A line that starts with yes could have failed.", indent="")

    _chapter("1. The recordings")
    _say(
        f"{whole.subjects} simulated subjects, {whole.sessions * whole.seconds} s each: {whole.units} units, "
        f"{whole.channels} channels of LFP at 1 kHz, and a joystick, in {whole.subjects * whole.sessions} NWB files. "
        "Hidden dynamics drive all three. How they drive each unit is the same in all subjects; tempo, firing rates, "
        "gains and noise differ between subjects."
    )
    began = time.monotonic()
    whole.recordings.mkdir()
    size = sum(written for _, written in LocalEngine(2).run(write_recording, list_sessions(whole)))
    _say(f"Written with pynwb: {size / 1e6:.0f} MB in {time.monotonic() - began:.1f} s.")

    _chapter("2. Recordings become shards")
    _say("Windows of 1 s that overlap by half, written in parallel, split by subject. The same command:")
    _show("penstock convert 'recordings/*.nwb' --output shards \\")
    _show(f"  --bin-size-ms {BIN_MS:.0f} --sequence-length {BINS} --overlap 0.5 --shard-size {whole.shard_size} \\")
    _show("  --split train=0.67,test=0.33 --group-by subject --workers 2")
    began, names = time.monotonic(), ("train", "test")
    convert_to_shards(
        str(whole.recordings / "*.nwb"),
        folder / "shards",
        reading=ReadOptions(
            nwb=NWBOptions(("spikes", "lfp", "behavior"), bin_size_ms=BIN_MS, sequence_length=BINS, overlap=0.5)
        ),
        options=ConvertOptions(WriteOptions(whole.shard_size), Split((("train", 0.67), ("test", 0.33)), "subject")),
        workers=2,
        show_progress=False,
    )
    made = {name: Manifest.read(whole.shards(name) / "dataset_metadata.json") for name in names}
    for name, manifest in made.items():
        subjects = sorted({entry["groups"]["subject"] for entry in manifest.metadata["conversion"]["inputs"]})
        megabytes = sum(shard.stored_bytes for shard in manifest.shards) / 1e6
        shards = f"{manifest.n_items:>6,} windows in {len(manifest.shards):>2} shards, {megabytes:>4.0f} MB"
        _show(f"{name:<5} {shards}: {', '.join(subjects)}")
    _say(f"{time.monotonic() - began:.1f} s.")

    _chapter("3. Every byte is verified")
    began = time.monotonic()
    problems = [problem for name in names for problem in verify_shards(whole.shards(name), workers=2)[1]]
    detail = str(problems[0]) if problems else f"all shards read and verified in {time.monotonic() - began:.1f} s"
    check([Check("All shards are healthy", not problems, detail)])

    _chapter("4. A decoder from spikes to movement is trained without interruption")
    (folder / "runs").mkdir()
    _, plan = whole.open()
    _say(
        f"{whole.epochs} epochs of {plan.n_batches} batches of {whole.batch_size} windows, shuffled, spikes "
        "standardised by the training split. Then it decodes held-out subjects: R² is 1 for a perfect decoder, and 0 "
        "for one that only predicts the mean."
    )
    _run("train", whole)
    check(check_decoding(whole.result()["subjects"]))

    _chapter("5. The same training is killed in the middle of an epoch, and resumes in another process")
    steps = whole.epochs * plan.n_batches
    saved = int(0.7 * steps) // whole.checkpoint_steps * whole.checkpoint_steps
    killed = replace(whole, name="killed", hold_at=saved + whole.checkpoint_steps - 1)
    _run("train", killed, kill=lambda: _count_lines(killed.path("steps")) >= saved + whole.lost_steps)
    done = len(killed.steps())
    _say(
        f"SIGKILL after {done} steps, batch {done % plan.n_batches} of epoch {done // plan.n_batches}. The last "
        f"checkpoint is of step {saved}: {done - saved} steps are lost, and repeated by a process with 3 workers."
    )
    resumed = replace(whole, name="resumed", workers=3, resume="killed")
    _run("train", resumed)
    _say("Is the interrupted training identical to the uninterrupted one?")
    check(compare(whole, killed, resumed, plan))

    _chapter("6. One bit of one shard is flipped")
    item = int(generator_for(seed, "demo", "damage").integers(plan.length))
    damage = copy_damaged(whole.shards("train"), whole.damaged, item)
    _say(f"In a copy: byte {damage.byte:,} of {damage.shard}, in the spikes of window {item:,}.")
    _, problems = verify_shards(whole.damaged, workers=2)
    _run("read_damaged", damaged := replace(whole, name="damaged"))
    found = damaged.result()
    _say("By default, a loader stops with this error:")
    _show(found["error"]["message"] if found["error"] else "(none)")
    _say("With on_error='substitute', it continues, and logs:")
    _show(found["log"][0].replace(f"{folder}{os.sep}", "") if found["log"] else "(nothing)")
    check(check_damage(damage, problems, found, plan))

    _chapter("7. Speed, and the report")
    trained, alone = whole.result()["watched"], found["watched"]
    _say(
        f"The training processed {trained['items_per_second']:,.0f} windows/s and waited for data "
        f"{100 * trained['wait_fraction']:.1f} % of the time (median {trained['wait_p50_ms']:.2f} ms per batch; "
        f"{trained['startup_ms']:.0f} ms for the first batch of an epoch). The loader alone, with the LFP, delivers "
        f"{alone['items_per_second']:,.0f} windows/s or {alone['bytes_per_second'] / 1e6:,.0f} MB/s from the page "
        "cache, and verifies every checksum."
    )
    size = (folder / "report.html").stat().st_size
    check([Check("The report is one HTML file", size > 0, f"report.html, {size / 1e3:.0f} kB")])
    return checks


def _run(job: str, settings, kill: Callable[[], bool] = lambda: False) -> None:  # imported later
    """Run a job in a process of its own to its end, or kill it as soon as `kill()` says so."""
    command = [sys.executable, "-m", "examples.demo.train", job, str(settings.save())]
    killed = False
    with settings.path("errors").open("wb") as errors:
        process = subprocess.Popen(command, stdout=errors, stderr=errors, cwd=Path(__file__).parents[2])
        try:
            while process.poll() is None and not (killed := kill()):
                time.sleep(0.002)
        finally:
            process.kill()
            process.wait()
    if process.returncode and not killed:
        lines = settings.path("errors").read_text().strip().splitlines() or [f"exit code {process.returncode}"]
        sys.exit(f"The process {settings.name} of the demo failed: {lines[-1]}")


def _count_lines(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.read_bytes().count(b"\n")
    return 0


def _chapter(title: str) -> None:
    print(f"\n{title}", flush=True)


def _say(text: str, indent: str = _INDENT) -> None:
    print(textwrap.fill(text, _WIDTH, initial_indent=indent, subsequent_indent=indent), flush=True)


def _show(line: str) -> None:
    """Print a command, a message or a row of a table, wrapped if it is too long."""
    deeper = f"{_INDENT}  "
    if len(deeper + line) > _WIDTH:
        line = textwrap.fill(line, _WIDTH - len(deeper), break_on_hyphens=False).replace("\n", f"\n{deeper}")
    print(f"{deeper}{line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
