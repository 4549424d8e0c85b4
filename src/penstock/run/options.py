"""How a plan is executed."""

from dataclasses import dataclass
from typing import Literal, get_args

from penstock.core.errors import OptionError

__all__ = ["Executor", "RunOptions", "StartMethod"]

Executor = Literal["auto", "inline", "threads", "processes"]
StartMethod = Literal["fork", "forkserver", "spawn"]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a plan is executed; never changes what it yields."""

    executor: Executor = "auto"
    """`"auto"`: inline without workers; with them, threads, or processes where a few timed draws show that threads
    wait for each other (Python-heavy datasets and transforms)."""

    prefetch: int = 2
    """Batches that each worker may be ahead of the consumer."""

    start_method: StartMethod | None = None
    """How worker processes start; None: what Python does on this system."""

    persistent: bool = False
    """Keep worker processes after an epoch, until `close()`. Saves their start; costs their memory."""

    timeout_seconds: float | None = None
    """Give up on a batch that takes longer than this, with an error that names its items; None: wait for ever."""

    device_ahead: int = 1
    """Batches that are copied to the device ahead of the one that computes; each takes its bytes there."""

    pin_memory: bool = False
    """Give batches page-locked memory where there is a CUDA device, also where `device` is not that device."""

    memory_bytes: int | None = None
    """Refuse to start where `memory_estimate()` says that more is needed; None: no limit."""

    def __post_init__(self) -> None:
        if self.executor not in get_args(Executor):
            raise OptionError(f"executor={self.executor!r} is not one of {', '.join(map(repr, get_args(Executor)))}.")
        if self.prefetch < 1:
            raise OptionError(f"prefetch={self.prefetch} leaves nothing to train on; use 1 or more.")
        if self.device_ahead < 1:
            raise OptionError(f"device_ahead={self.device_ahead} leaves no copy to overlap with; use 1 or more.")
        if self.start_method is not None and self.start_method not in get_args(StartMethod):
            allowed = ", ".join(map(repr, get_args(StartMethod)))
            raise OptionError(f"start_method={self.start_method!r} is not one of {allowed}.")
        for name, value in (("timeout_seconds", self.timeout_seconds), ("memory_bytes", self.memory_bytes)):
            if value is not None and value <= 0:
                raise OptionError(f"{name}={value} allows nothing; use more than 0, or None for no limit.")

    def executor_for(self, num_workers: int) -> Executor:
        """Return what executes a plan with that many workers; raise OptionError where it cannot have them."""
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
            raise OptionError(f"num_workers={num_workers!r} cannot be; use 0 (no workers) or more.")
        if num_workers == 0:
            if self.executor in ("threads", "processes"):
                raise OptionError(f"executor={self.executor!r} needs num_workers of 1 or more, got 0.")
            return "inline"
        if self.executor == "inline":
            raise OptionError(
                f"executor='inline' has no workers, but num_workers={num_workers}; use 0, or another executor."
            )
        return self.executor
