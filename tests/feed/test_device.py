"""Copies to the device, with a stand-in for CUDA that records every call: their order, and how long memory is kept."""

import gc
import weakref
from collections import namedtuple
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import Mishap, mishap_in_the_users_code

from penstock import ArraySource, Loader, OptionError, Plan, Sequential
from penstock.feed.device import map_tensors, move_to_device, resolve_device

CUDA = torch.device("cuda")
Pair = namedtuple("Pair", "left right")


class Event:
    """A copy that is over when the test says so."""

    def __init__(self, number: int) -> None:
        self.number, self.over, self.waited_for = number, False, False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over = self.waited_for = True


class Streams:
    """Stands in for CudaStreams."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.events: list[Event] = []
        self.on_side = False
        self.fail_at: int | None = None

    @contextmanager
    def side(self) -> Iterator[None]:
        self.on_side = True
        try:
            yield
        finally:
            self.on_side = False

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.on_side, "copies are issued on the side stream"
        number = int(tensor[0])
        if number == self.fail_at:
            mishap_in_the_users_code("move", number)
        self.calls.append(("move", number))
        return tensor.clone()

    def record_copy(self) -> Event:
        event = Event(len(self.events))
        self.events.append(event)
        self.calls.append(("record_copy", event.number))
        return event

    def wait(self, event: Event) -> None:
        assert not self.on_side, "the consumer's stream is the one that waits"
        self.calls.append(("wait", event.number))

    def record_use(self, tensor: torch.Tensor) -> torch.Tensor:
        assert not self.on_side
        self.calls.append(("record_use", int(tensor[0])))
        return tensor


class Host:
    """Batches in main memory, and which of them are still alive."""

    def __init__(self, count: int, fail_at: int | None = None) -> None:
        self.count, self.fail_at = count, fail_at
        self.made: list[weakref.ref[torch.Tensor]] = []

    def batches(self) -> Generator[torch.Tensor, None, None]:
        for number in range(self.count):
            if number == self.fail_at:
                mishap_in_the_users_code("host", number)
            tensor = torch.tensor([number, number * 10])
            self.made.append(weakref.ref(tensor))
            yield tensor
            del tensor

    def alive(self) -> list[int]:
        gc.collect()
        return [number for number, tensor in enumerate(self.made) if tensor() is not None]


def generate(batches: list[Any]) -> Generator[Any, None, None]:
    yield from batches


def test_every_batch_arrives_in_order() -> None:
    streams = Streams()
    assert [batch.tolist() for batch in move_to_device(Host(5).batches(), CUDA, streams)] == [
        [n, n * 10] for n in range(5)
    ]


def test_each_batch_is_moved_on_the_side_stream_then_waited_for_then_recorded_as_used() -> None:
    streams = Streams()
    list(move_to_device(Host(4).batches(), CUDA, streams))
    for number in range(4):
        steps = [streams.calls.index((step, number)) for step in ("move", "record_copy", "wait", "record_use")]
        assert steps == sorted(steps)
    assert len(streams.calls) == 16


def test_two_batches_are_in_flight_and_no_more() -> None:
    host, streams = Host(6), Streams()
    batches = move_to_device(host.batches(), CUDA, streams)
    for taken in range(1, 5):
        next(batches)
        # The one that was handed out, and one whose copy is under way.
        assert len(host.made) == taken + 1
        assert ("move", taken) in streams.calls
        assert ("wait", taken) not in streams.calls


def test_host_memory_is_kept_until_its_copy_has_finished() -> None:
    host, streams = Host(8), Streams()
    batches = move_to_device(host.batches(), CUDA, streams)
    taken = list(islice(batches, 4))
    assert host.alive() == [0, 1, 2, 3, 4]  # no copy is over; the fifth is under way
    streams.events[0].over = streams.events[1].over = True
    taken.append(next(batches))
    assert host.alive() == [2, 3, 4, 5]
    streams.events[4].over = True  # out of order: those before it are not over
    taken.append(next(batches))
    assert 2 in host.alive()
    assert 3 in host.alive()


@pytest.mark.parametrize("end", ["close", "drop", "exhaust", "error"])
def test_host_memory_is_kept_until_its_copy_has_finished_even_if_the_consumer_stops(end: str) -> None:
    host, streams = Host(3, fail_at=2 if end == "error" else None), Streams()
    batches = move_to_device(host.batches(), CUDA, streams)
    next(batches)
    if end == "close":
        batches.close()
    elif end == "drop":
        del batches
    elif end == "exhaust":
        list(batches)
    else:
        with pytest.raises(Mishap):
            list(batches)
    gc.collect()
    # Memory that goes back to the pool is written to again: a copy that still reads it would be torn.
    lost = [n for n, tensor in enumerate(host.made) if tensor() is None and not streams.events[n].over]
    assert lost == [], f"copies {lost} were under way when their memory was given back"


def test_an_error_comes_after_the_batches_before_it() -> None:
    found: list[int] = []
    with pytest.raises(Mishap) as caught:
        found.extend(int(batch[0]) for batch in move_to_device(Host(9, fail_at=4).batches(), CUDA, Streams()))
    assert (found, caught.value.where) == ([0, 1, 2, 3], "host")


def test_an_error_of_the_copy_comes_once_after_the_batches_before_it() -> None:
    host, streams, found = Host(9), Streams(), []
    streams.fail_at = 3
    batches = move_to_device(host.batches(), CUDA, streams)
    with pytest.raises(Mishap) as caught:
        found.extend(int(batch[0]) for batch in batches)
    assert (found, caught.value.where, len(host.made)) == ([0, 1, 2], "move", 4)
    assert next(batches, "end") == "end"


def test_no_batches_make_no_calls() -> None:
    streams = Streams()
    assert (list(move_to_device(Host(0).batches(), CUDA, streams)), streams.calls) == ([], [])


def test_on_the_cpu_batches_pass_as_they_are() -> None:
    given = [{"x": torch.arange(3)}, (torch.ones(2), "text")]
    assert all(
        found is wanted
        for found, wanted in zip(move_to_device(generate(given), torch.device("cpu")), given, strict=True)
    )


def test_another_kind_of_device_gets_every_tensor_moved() -> None:
    given = [{"x": torch.arange(3.0), "deep": [torch.ones(2), "text"]}]
    (found,) = move_to_device(generate(given), torch.device("meta"))
    assert (found["x"].device.type, found["deep"][0].device.type, found["deep"][1]) == ("meta", "meta", "text")


def test_tensors_are_found_in_any_nested_batch() -> None:
    batch = {
        "a": torch.tensor(1),
        "b": [torch.tensor(2), "s"],
        "c": (torch.tensor(3), Pair(torch.tensor(4), 5)),
        "d": None,
    }
    found = map_tensors(batch, lambda tensor: tensor * 10)
    assert found == {"a": 10, "b": [20, "s"], "c": (30, Pair(40, 5)), "d": None}
    assert type(found["c"][1]) is Pair
    assert batch["a"] == 1


@pytest.mark.parametrize("device", ["gpu", "cuda:x", 1.5, object()], ids=["gpu", "cuda:x", "1.5", "object"])
def test_an_invalid_device_is_refused_with_an_example(device: Any) -> None:
    with pytest.raises(OptionError, match=r"(?s)must be a torch device such as 'cuda:0'.*got"):
        resolve_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_cuda_device_is_refused_when_the_loader_is_made() -> None:
    source = ArraySource({"x": np.arange(8)})
    with pytest.raises(OptionError, match=r"device='cuda'.*no CUDA device"):
        Loader(source, Plan(source.index, Sequential(), batch_size=4), device="cuda")


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_the_cpu_is_the_default(device: Any) -> None:
    assert resolve_device(device) == torch.device("cpu")


def test_a_loader_delivers_to_its_device() -> None:
    source = ArraySource({"x": np.arange(8.0)})
    with Loader(source, Plan(source.index, Sequential(), batch_size=4), device="meta") as loader:
        assert [batch["x"].device.type for batch in loader] == ["meta", "meta"]
        assert loader.at(0, 0)["x"].device.type == "meta"
