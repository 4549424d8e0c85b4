"""How busy the GPUs are, as NVIDIA's management library (NVML) tells; nothing where it is not there."""

import os
import warnings
from typing import Any, NamedTuple

import torch

__all__ = ["Gpus", "Load"]


class Load(NamedTuple):
    """What one GPU does now."""

    name: str
    utilization_percent: int
    """Share of the last moments (up to a second) in which it computed anything at all."""

    memory_used_bytes: int
    memory_total_bytes: int


class Gpus:
    """The GPUs that this process may use; without `pynvml` (package nvidia-ml-py) or a driver, there are none.

    A context manager. Asking takes well under a millisecond and leaves the GPU alone.
    """

    def __init__(self) -> None:
        self._nvml, self._handles = _opened()

    def loads(self) -> list[Load]:
        """Return what each of them does; none of those that do not tell, such as a part of one."""
        return [load for handle in self._handles if (load := self._load(handle)) is not None]

    def current(self) -> Load | None:
        """Return what the one that torch uses in this process does, or None."""
        # Asked only where CUDA runs already: asking would start it, and it takes memory.
        index = torch.cuda.current_device() if _cuda_runs() else 0
        return self._load(self._handles[index]) if index < len(self._handles) else None

    def close(self) -> None:
        """Let go of the library; twice is fine."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
        self._nvml, self._handles = None, []

    def _load(self, handle: Any) -> Load | None:
        try:
            rates, memory = self._nvml.nvmlDeviceGetUtilizationRates(handle), self._nvml.nvmlDeviceGetMemoryInfo(handle)
            name = self._nvml.nvmlDeviceGetName(handle)
        except self._nvml.NVMLError:
            return None
        name = name.decode() if isinstance(name, bytes) else name  # older versions
        return Load(name, int(rates.gpu), int(memory.used), int(memory.total))

    def __enter__(self) -> "Gpus":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _opened() -> tuple[Any, list[Any]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # that the package has another name now
            import pynvml  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415  # optional
    except ImportError:
        return None, []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        return None, []
    return pynvml, _handles(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _handles(nvml: Any, visible: str | None) -> list[Any]:
    """Return those that CUDA_VISIBLE_DEVICES names, by number or identity; as in CUDA, it ends at the first unknown."""
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    found = []
    for word in (part.strip() for part in visible.split(",")):
        try:
            if word.isdigit():
                found.append(nvml.nvmlDeviceGetHandleByIndex(int(word)))
            else:
                found.append(nvml.nvmlDeviceGetHandleByUUID(word))
        except nvml.NVMLError:
            break
    return found


def _cuda_runs() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch's
