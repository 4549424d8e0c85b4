"""Load of the GPUs, read from NVIDIA's management library (NVML) if it is installed."""

import os
import warnings
from typing import Any, NamedTuple

import torch

__all__ = ["GpuLoad", "Gpus"]


class GpuLoad(NamedTuple):
    """Current load of one GPU."""

    name: str
    utilization_percent: int
    """Percentage of the last moments (up to a second) in which a kernel ran."""

    memory_used_bytes: int
    memory_total_bytes: int


class Gpus:
    """The GPUs that this process may use; without `pynvml` (package nvidia-ml-py) or a driver, there are none.

    A context manager. A query takes well under a millisecond and does not disturb the GPU.
    """

    def __init__(self) -> None:
        self._nvml, self._handles = _open_nvml()

    def loads(self) -> list[GpuLoad]:
        """Return the load of each GPU; GPUs that report none (such as MIG slices) are skipped."""
        return [load for handle in self._handles if (load := self._load(handle)) is not None]

    def current(self) -> GpuLoad | None:
        """Return the load of the GPU that torch uses in this process, or None."""
        # Torch is asked only if CUDA is initialized: the query would initialize it, which takes memory.
        index = torch.cuda.current_device() if _is_cuda_initialized() else 0
        return self._load(self._handles[index]) if index < len(self._handles) else None

    def close(self) -> None:
        """Close the library. Idempotent."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
        self._nvml, self._handles = None, []

    def _load(self, handle: Any) -> GpuLoad | None:
        try:
            rates, memory = self._nvml.nvmlDeviceGetUtilizationRates(handle), self._nvml.nvmlDeviceGetMemoryInfo(handle)
            name = self._nvml.nvmlDeviceGetName(handle)
        except self._nvml.NVMLError:
            return None
        name = name.decode() if isinstance(name, bytes) else name  # older versions of pynvml
        return GpuLoad(name, int(rates.gpu), int(memory.used), int(memory.total))

    def __enter__(self) -> "Gpus":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_nvml() -> tuple[Any, list[Any]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the package has another name now
            import pynvml  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415  # optional
    except ImportError:
        return None, []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        return None, []
    return pynvml, _handles(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _handles(nvml: Any, visible: str | None) -> list[Any]:
    """Return the GPUs of CUDA_VISIBLE_DEVICES, given by number or UUID; as in CUDA, up to the first unknown one."""
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


def _is_cuda_initialized() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch's
