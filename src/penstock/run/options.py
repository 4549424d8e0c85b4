"""Options of plan execution."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError

__all__ = ["Executor", "RunOptions", "StartMethod"]

Executor = Literal["auto", "inline", "threads", "processes"]
StartMethod = Literal["fork", "forkserver", "spawn"]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a plan is executed; never changes what it yields."""

    executor: Executor = "auto"
    """`"auto"`: inline without workers; with workers, threads, or processes if a transform, a collate function or a
    dataset makes items one by one in Python. The log says why; what cannot be sent to processes stays in threads."""

    prefetch: int | None = None
    """Batches that each worker may be ahead of the consumer. None: enough for 128 items, at most 16 MiB of batches, and
    never fewer than 2, so that single slow items delay nobody."""

    start_method: StartMethod | None = None
    """How worker processes start; None: Python's default on this system."""

    persistent: bool = False
    """Keep worker processes after an epoch, until `close()`. Saves their start; costs their memory."""

    timeout_seconds: float | None = None
    """Raise an error that names the items if a batch takes longer than this; None: no limit. Needs workers."""

    device_ahead: int = 1
    """Batches copied to the device ahead of the one in use; each takes its bytes there."""

    pin_memory: bool = False
    """Allocate batches in page-locked memory if there is a CUDA device, even if `device` is another one."""

    memory_bytes: int | None = None
    """Refuse to start if `memory_estimate()` is larger; None: no limit."""

    read_ahead_bytes: int = 128 << 20
    """How much of the batches to come the disk may read ahead; less if it keeps up. 0: nothing, as if the source had
    no `prepare`."""

    page_cache_bytes: int | None = None
    """Memory that the files of a larger dataset may take; None: half of what is available. What the next epoch needs
    first is kept; all else is given back to the system when it was read."""

    worker_init: Callable[[int], None] | None = None
    """Called with the number of each worker process when it starts, such as to open a connection. Workers are processes
    if it is given."""

    def __post_init__(self) -> None:
        if self.executor not in get_args(Executor):
            allowed = ", ".join(map(repr, get_args(Executor)))
            raise OptionError(f"executor must be one of {allowed}, got {self.executor!r}.")
        for name, count in (("prefetch", self.prefetch), ("device_ahead", self.device_ahead)):
            if count is not None:
                check_integer(name, count, at_least=1)
        for name, size in (("read_ahead_bytes", self.read_ahead_bytes), ("page_cache_bytes", self.page_cache_bytes)):
            if size is not None and size < 0:
                raise OptionError(f"{name} must be an integer >= 0, got {size!r}.")
        if self.start_method is not None and self.start_method not in get_args(StartMethod):
            allowed = ", ".join(map(repr, get_args(StartMethod)))
            raise OptionError(f"start_method must be one of {allowed}, or None, got {self.start_method!r}.")
        if self.worker_init is not None and self.executor == "threads":
            raise OptionError("worker_init needs worker processes, got executor='threads'. Use executor='processes'.")
        for name, value in (("timeout_seconds", self.timeout_seconds), ("memory_bytes", self.memory_bytes)):
            if value is not None and value <= 0:
                raise OptionError(f"{name} must be > 0, or None for no limit, got {value!r}.")

    def executor_for(self, num_workers: int) -> Executor:
        """Return the executor for `num_workers` workers; raise OptionError if the two do not go together."""
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
            raise OptionError(f"num_workers must be an integer >= 0, got {num_workers!r}.")
        if num_workers == 0:
            if self.executor in ("threads", "processes"):
                raise OptionError(f"executor={self.executor!r} needs num_workers >= 1, got 0.")
            if self.timeout_seconds is not None:
                raise OptionError(
                    f"timeout_seconds={self.timeout_seconds} needs num_workers >= 1, got 0: nothing can interrupt "
                    "this thread while it makes a batch. Use num_workers=1, or timeout_seconds=None."
                )
            return "inline"
        if self.executor == "inline":
            raise OptionError(f"executor='inline' needs num_workers=0, got {num_workers}. Use 0, or another executor.")
        if self.executor == "auto" and self.worker_init is not None:
            return "processes"
        return self.executor
