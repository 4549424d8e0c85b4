"""The result of a tuning: the settings that were tried, their speed, the best one, and a verdict in words."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from penstock.core.errors import OptionError
from penstock.core.text import count
from penstock.files.durable import write_aside
from penstock.files.kinds import local_path
from penstock.files.machine import Machine, this_machine
from penstock.files.regular import read_regular
from penstock.run.options import Executor, RunOptions

__all__ = ["NEAR", "Setting", "Trial", "Tuning"]

NEAR = 0.95
"""Fraction of the top speed: the simplest setting that reaches it is chosen."""

_VERSION = 1
_MAX_SECONDS = 1e9
_SIMPLEST: tuple[Executor, ...] = ("inline", "threads", "processes")


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """One way to execute a loader; simpler ones sort first."""

    rank: int
    workers: int
    prefetch: int

    @classmethod
    def of(cls, executor: Executor, workers: int = 0, prefetch: int = 2) -> "Setting":
        """Return the setting with this executor: `"inline"`, `"threads"` or `"processes"`."""
        return cls(_SIMPLEST.index(executor), workers, prefetch)

    @property
    def executor(self) -> Executor:
        """The executor that makes the batches."""
        return _SIMPLEST[self.rank]

    def apply_to(self, options: RunOptions) -> RunOptions:
        """Return the options of a penstock loader with this setting."""
        executor: Executor = self.executor if self.workers else "auto"
        prefetch = self.prefetch if self.workers else options.prefetch
        timeout = options.timeout_seconds if self.workers else None
        persistent = self.executor == "processes"
        return replace(options, executor=executor, prefetch=prefetch, persistent=persistent, timeout_seconds=timeout)

    def __str__(self) -> str:
        if not self.workers:
            return "no workers"
        kind = {"threads": "thread", "processes": "worker process"}[self.executor]
        return f"{count(self.workers, kind)}, {count(self.prefetch, 'batch')} ahead each"


@dataclass(frozen=True, slots=True)
class Trial:
    """The best measurement of one setting: other load on the machine only ever adds time."""

    setting: Setting
    seconds_per_batch: float
    """Duration of one turn of the loop: waiting for a batch, plus the training step if there is one."""

    startup_seconds: float
    """Time until the first batch."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """The best setting, and the measurements behind it. Never changes the order of items."""

    trials: tuple[Trial, ...]
    batch_items: int
    batch_bytes: int
    step_seconds: float | None
    """Duration of a training step without waiting for data; None if unknown."""

    machine: Machine
    remarks: tuple[str, ...] = ()
    """What was not tried, and why."""

    @property
    def chosen(self) -> Trial:
        """The simplest setting that is within 5 % of the fastest."""
        fastest = min(trial.seconds_per_batch for trial in self.trials)
        return min(
            (trial for trial in self.trials if trial.seconds_per_batch * NEAR <= fastest),
            key=lambda trial: trial.setting,
        )

    @property
    def setting(self) -> Setting:
        """The setting to use."""
        return self.chosen.setting

    @property
    def gain(self) -> float:
        """Speedup over no workers."""
        return self.trial("inline").seconds_per_batch / self.chosen.seconds_per_batch

    @property
    def wait_fraction(self) -> float | None:
        """Fraction of the time that the training waits for data with this setting; None without a training step."""
        if self.step_seconds is None:
            return None
        return max(0.0, 1 - self.step_seconds / self.chosen.seconds_per_batch)

    def trial(self, executor: Executor) -> Trial:
        """Return the fastest trial with this executor."""
        found = [trial for trial in self.trials if trial.setting.executor == executor]
        if not found:
            raise OptionError(f"executor must be one that was tried ({_join_settings(self.trials)}), got {executor!r}.")
        return min(found, key=lambda trial: trial.seconds_per_batch)

    def loader_kwargs(self, options: RunOptions | None = None) -> dict[str, Any]:
        """Return keyword arguments for a penstock `Loader`, based on `options`."""
        return {"num_workers": self.setting.workers, "options": self.setting.apply_to(options or RunOptions())}

    def _loader_json(self) -> dict[str, Any]:
        """Return what `loader(**…)` takes, as plain JSON: what differs from the defaults."""
        chosen, default = asdict(self.setting.apply_to(RunOptions())), asdict(RunOptions())
        options = {name: value for name, value in chosen.items() if value != default[name]}
        return {"num_workers": self.setting.workers, **({"options": options} if options else {})}

    def dataloader_kwargs(self) -> dict[str, Any]:
        """Return keyword arguments for a torch `DataLoader`."""
        chosen = self.setting
        if chosen.executor == "threads":
            raise OptionError(
                f"A torch DataLoader has worker processes only, got {chosen}, tuned for a penstock Loader. Tune the "
                "dataset itself: tune(dataset, batch_size=...)."
            )
        if not chosen.workers:
            return {"num_workers": 0}
        return {"num_workers": chosen.workers, "prefetch_factor": chosen.prefetch, "persistent_workers": True}

    @property
    def table(self) -> str:
        """What was measured, one line for each setting; `<` marks the chosen one."""
        trials = sorted(self.trials, key=lambda trial: trial.setting)
        width = max(len(str(trial.setting)) for trial in trials)
        return "\n".join(
            f"{trial.setting!s:<{width}}  {1000 * trial.seconds_per_batch:9.3f} ms per batch, "
            f"{trial.startup_seconds:6.2f} s to start{'  <' if trial is self.chosen else ''}"
            for trial in trials
        )

    def __str__(self) -> str:
        return f"{self.table}\n\n{self.verdict}"

    @property
    def verdict(self) -> str:
        """The result in words."""
        return "\n".join([*self._speeds(), *self._bottleneck(), self._advice(), *self.remarks])

    def _speeds(self) -> list[str]:
        chosen = self.chosen
        rate = 1 / chosen.seconds_per_batch
        moved = f", {rate * self.batch_bytes / 1e6:,.1f} MB/s" if self.batch_bytes else ""
        what = "The loop with the training step runs at" if self.step_seconds is not None else "The loader delivers"
        words = [f"{what} {rate:,.1f} batches/s ({rate * self.batch_items:,.0f} items/s{moved}) with {chosen.setting}."]
        if chosen.setting.workers:
            words.append(f"This is {self.gain:.2f} times as fast as without workers.")
        return words

    def _bottleneck(self) -> list[str]:
        if self.step_seconds is None or self.wait_fraction is None:
            milliseconds = 1000 * self.chosen.seconds_per_batch
            return [f"A training step shorter than {milliseconds:.3g} ms will wait for data."]
        took, waits = 1000 * self.step_seconds, self.wait_fraction
        timing = (
            f"A training step takes {took:.3g} ms, and the training waits {100 * waits:.0f} % of the time for data:"
        )
        if waits < 0.1:
            return [f"{timing} data is not the bottleneck."]
        return [
            f"{timing} data is the bottleneck. Make items cheaper to load (store them decoded, in larger chunks)"
            f"{self._advise_on_cpus()}."
        ]

    def _advise_on_cpus(self) -> str:
        """Return what would help besides cheaper items, as far as it was tried."""
        workers = self.setting.workers
        if max(trial.setting.workers for trial in self.trials) <= workers:
            return f", or try more workers (max_workers={max(2 * workers, 2 * self.machine.cpus)})"
        return ", or add CPUs" if workers == self.machine.cpus else "; more workers are not faster"

    def _advice(self) -> str:
        if not self.setting.workers:
            others = [trial for trial in self.trials if trial.setting.workers]
            best = min((trial.seconds_per_batch for trial in others), default=None)
            if best is None:
                return "Set num_workers=0."
            gain = self.chosen.seconds_per_batch / best
            return f"Set num_workers=0: the best setting with workers is {gain:.2f} times as fast."
        # A dataset is tuned in torch's loader, which has no threads and no executor argument.
        kind = f", executor={self.setting.executor!r}" if self.setting.executor == "threads" else ""
        return f"Set num_workers={self.setting.workers}{kind}, prefetch {self.setting.prefetch}."

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON."""
        trials = [
            {
                "executor": trial.setting.executor,
                "workers": trial.setting.workers,
                "prefetch": trial.setting.prefetch,
                "seconds_per_batch": trial.seconds_per_batch,
                "startup_seconds": trial.startup_seconds,
            }
            for trial in self.trials
        ]
        return {
            "version": _VERSION,
            "trials": trials,
            "batch_items": self.batch_items,
            "batch_bytes": self.batch_bytes,
            "step_seconds": self.step_seconds,
            "machine": asdict(self.machine),
            "loader": self._loader_json(),
            "remarks": list(self.remarks),
            "verdict": self.verdict,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the result to a small file, for other runs on this machine."""
        write_aside(Path(path), f"{json.dumps(self.to_dict(), indent=1)}\n".encode(), lasting=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tuning":
        """Read a file written by `save`; raise OptionError if the machine now has another number of CPUs."""
        local_path(path)
        try:
            found = json.loads(read_regular(path))
            _check_version(path, found["version"])
            trials = tuple(
                Trial(
                    _parse_setting(trial),
                    _parse_seconds(trial["seconds_per_batch"], positive=True),
                    _parse_seconds(trial["startup_seconds"]),
                )
                for trial in found["trials"]
            )
            tuning = cls(
                trials,
                _parse_count(found["batch_items"]),
                _parse_count(found["batch_bytes"]),
                None if found["step_seconds"] is None else _parse_seconds(found["step_seconds"]),
                Machine(**{name: _parse_count(value) for name, value in found["machine"].items()}),
                tuple(_parse_text(remark) for remark in found["remarks"]),
            )
        except OptionError:  # of another version
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise OptionError(
                f"Could not read {path} as a tuning: {error!r}. Make one with `penstock tune`."
            ) from error
        here = this_machine().cpus
        if not trials or here != tuning.machine.cpus:
            raise OptionError(
                f"{path} was tuned with {count(tuning.machine.cpus, 'CPU')}, and this machine has {here}. Tune again."
            )
        return tuning


def _check_version(path: object, version: Any) -> None:
    if version != _VERSION:
        raise OptionError(f"{path} must have version {_VERSION}, got {version!r}. Tune again.")


def _parse_setting(stored: Any) -> Setting:
    workers, prefetch = _parse_count(stored["workers"]), _parse_count(stored["prefetch"], at_least=1)
    setting = Setting.of(stored["executor"], workers, prefetch)
    if workers and setting.executor == "inline":
        raise ValueError(f"executor='inline' must have no workers, got {workers}")
    return setting


def _parse_count(value: Any, at_least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value < 1 << 63:
        raise ValueError(f"a count must be an integer >= {at_least}, got {value!r}"[:200])
    return value


def _parse_seconds(value: Any, *, positive: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MAX_SECONDS:
        raise ValueError(f"a duration must be a number of seconds, got {value!r}"[:200])
    if positive and not value:
        raise ValueError("a batch must have taken some time")
    return float(value)


def _parse_text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"a remark must be printable text, got {value!r}"[:200])
    return value


def _join_settings(trials: Sequence[Trial]) -> str:
    return "; ".join(str(trial.setting) for trial in trials)
