"""Which GPUs a watch looks at, and what it says of them. Nvidia's library is a stand-in: there is no GPU here."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from penstock_test_parts import FakeClock

import penstock.observe.watcher as watching
from penstock.observe.gpu import GpuLoad, Gpus
from penstock.observe.watcher import watch


class FakeNvml:
    """Answers as nvidia-ml-py does, for three GPUs, the last of which does not tell."""

    class NVMLError(Exception):
        pass

    def __init__(self, driver: bool = True) -> None:
        self.driver, self.open, self.percent = driver, 0, [10, 60, 0]

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("driver not loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= 3:
            raise self.NVMLError("invalid argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, identity: str) -> int:
        if identity not in ("GPU-a", "GPU-b"):
            raise self.NVMLError("not found")
        return ("GPU-a", "GPU-b").index(identity)

    def nvmlDeviceGetName(self, handle: int) -> bytes | str:
        return b"old" if handle == 0 else "new"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if handle == 2:
            raise self.NVMLError("not supported")
        return SimpleNamespace(gpu=self.percent[handle], memory=3)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=100 * (handle + 1), total=1000)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["old", "new"]),
        ("1", ["new"]),
        ("1,0", ["new", "old"]),
        ("GPU-b", ["new"]),
        ("1,-1,0", ["new"]),
        ("", []),
        ("2", []),
    ],
)
def test_the_gpus_are_those_that_cuda_may_see(
    visible: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with Gpus() as gpus:
        assert [load.name for load in gpus.loads()] == names
        if visible == "1":
            assert gpus.current() == GpuLoad("new", 60, 200, 1000)
        assert nvml.open == 1
    assert nvml.open == 0
    gpus.close()
    assert gpus.loads() == []
    assert gpus.current() is None


def test_without_the_library_or_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (None, FakeNvml(driver=False)):
        monkeypatch.setitem(sys.modules, "pynvml", module)  # type: ignore[arg-type]
        with Gpus() as gpus:
            assert gpus.loads() == []
            assert gpus.current() is None
        with watch([1, 2, 3], show=False) as w:
            list(w)
        assert not [name for name in w.to_dict() if name.startswith("gpu")]


def test_a_watch_reports_how_busy_the_gpu_was(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(50.0)
    monkeypatch.setattr(watching, "time", clock)
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    seen: list[int] = []

    def batches() -> Iterator[int]:
        for number in range(6):
            clock.now += 1.0
            nvml.percent[1] = 10 * number
            seen.append(10 * number)
            yield number

    with watch(batches(), show=False) as w:
        list(w)
    found = w.to_dict()
    assert found["gpu_utilization_percent"] == pytest.approx(np.mean([60, *seen, seen[-1]]))
    assert found["gpu_memory_peak_bytes"] == 200
    assert "GPU: 32 % busy, peak memory 200 bytes" in str(w)
    assert nvml.open == 0
