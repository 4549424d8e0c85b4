"""Downloads: each span once, what is waited for first, bounded in memory, errors to those who wait."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from penstock import ReadError
from penstock.files.spans import downloads as downloads_module
from penstock.files.spans.downloads import Downloads, Owner
from penstock.files.spans.span import WHOLE, Span

_SECONDS = 60


class _Server(Owner):
    """Objects whose byte at n is n % 251; requests wait while the gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[str, int, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fails: Callable[[Span], Exception | None] = lambda _: None
        self._lock = threading.Lock()

    def fetch(self, spans: Sequence[Span]) -> list[np.ndarray]:
        with self._lock:
            self.requests.append((spans[0].key, spans[0].begin, spans[-1].end))
        assert self.gate.wait(_SECONDS)
        for span in spans:
            error = self.fails(span)
            if error is not None:
                raise error
        return [_content(span) for span in spans]


def _content(span: Span) -> np.ndarray:
    end = 500 if span.end == WHOLE else span.end
    return (np.arange(span.begin, end) % 251).astype(np.uint8)


@contextmanager
def _open(server: _Server, connections: int = 4, memory_bytes: int = 1 << 20) -> Iterator[Downloads]:
    downloads = Downloads(connections=connections, memory_bytes=memory_bytes)
    try:
        yield downloads
    finally:
        server.gate.set()
        downloads.close(server)
        assert not server.n_busy
        assert not downloads._entries


def _wait_until(condition: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(_SECONDS * 200):
        if condition():
            return
        waiting.wait(0.005)
    raise AssertionError("it did not come true")


def _spans(*numbers: int, n_bytes: int = 1000, key: str = "a") -> list[Span]:
    return [Span(key, number * n_bytes, (number + 1) * n_bytes) for number in numbers]


def test_spans_are_returned_in_the_order_asked_for_also_twice() -> None:
    server = _Server()
    with _open(server) as downloads:
        asked = [*_spans(5, 0, 5), Span("b", 0, WHOLE), *_spans(7, key="c")]
        found, n_used, n_missing = downloads.get(server, asked)
        assert (n_used, n_missing) == (0, len(asked))
        for span, content in zip(asked, found, strict=True):
            np.testing.assert_array_equal(content, _content(span))
        assert downloads.get(server, asked)[1:] == (len(asked), 0)


def test_a_span_that_several_threads_need_is_fetched_once() -> None:
    server = _Server()
    server.gate.clear()
    with _open(server) as downloads:
        downloads.prepare(server, _spans(3))
        found: list[np.ndarray] = []
        threads = [threading.Thread(target=lambda: found.extend(downloads.get(server, _spans(3))[0])) for _ in range(4)]
        for thread in threads:
            thread.start()
        server.gate.set()
        for thread in threads:
            thread.join(_SECONDS)
        assert len(found) == 4
        assert server.requests == [("a", 3000, 4000)]


def test_neighbours_come_with_one_request_and_distant_ones_do_not() -> None:
    server = _Server()
    with _open(server, connections=1) as downloads:
        downloads.get(server, [*_spans(0, 1, 2), *_spans(900, 901), *_spans(0, key="b")])
        assert sorted(server.requests) == [("a", 0, 3000), ("a", 900_000, 902_000), ("b", 0, 1000)]


def test_neighbours_that_are_announced_in_another_order_share_a_request() -> None:
    server = _Server()
    with _open(server, connections=1) as downloads:
        downloads.prepare(server, [*_spans(3, 1), *_spans(0, key="b"), *_spans(2, 4)])
        _wait_until(lambda: len(server.requests) == 2 and not server.n_busy)
        assert server.requests == [("a", 1000, 5000), ("b", 0, 1000)]


def test_neighbours_share_a_request_though_they_were_announced_one_after_the_other() -> None:
    server = _Server()
    server.gate.clear()
    with _open(server, connections=1) as downloads:
        downloads.prepare(server, _spans(9, key="first"))
        _wait_until(lambda: len(server.requests) == 1)
        for number in (7, 2, 5, 3, 6):
            downloads.prepare(server, _spans(number))
        server.gate.set()
        found = downloads.get(server, _spans(*range(2, 8)))[0]
        for number, content in zip(range(2, 8), found, strict=True):
            np.testing.assert_array_equal(content, _content(_spans(number)[0]))
        # 4 was not announced, but is waited for together with the others.
        assert sorted(server.requests) == [("a", 2000, 8000), ("first", 9000, 10_000)]


def test_the_memory_of_a_request_counts_until_all_of_its_spans_are_released() -> None:
    server = _Server()
    with _open(server, connections=1) as downloads:
        downloads.get(server, _spans(0, 1, 2))
        assert server.requests == [("a", 0, 3000)]
        downloads.release(server, _spans(0, 2))
        assert downloads._held_bytes == 3000
        downloads.release(server, _spans(1))
        assert downloads._held_bytes == 0


def test_many_small_requests_are_under_way_and_few_large_ones() -> None:
    for n_bytes, most in ((1000, 40), (4 << 20, 16), (16 << 20, 4)):
        server = _Server()
        server.gate.clear()
        with _open(server, connections=40, memory_bytes=1 << 30) as downloads:
            server.fetch = lambda spans, server=server: _wait_at(server, spans)  # type: ignore[method-assign]
            downloads.prepare(server, [Span(f"k{number}", 0, n_bytes) for number in range(50)])
            _wait_until(lambda server=server, most=most: server.n_busy == most)  # type: ignore[misc]
            downloads.prepare(server, [Span("one more", 0, n_bytes)])
            assert server.n_busy == most
            reader = threading.Thread(target=downloads.get, args=(server, [Span("wanted", 0, 1000)]))
            reader.start()  # it need not wait for those that are fetched ahead
            _wait_until(lambda server=server, most=most: server.n_busy == min(most + 1, 40))  # type: ignore[misc]
            server.gate.set()
            reader.join(_SECONDS)


def _wait_at(server: _Server, spans: Sequence[Span]) -> list[np.ndarray]:
    assert server.gate.wait(_SECONDS)
    return [np.zeros(1, np.uint8) for _ in spans]


def test_the_size_of_a_whole_object_is_looked_for_again_before_it_is_fetched() -> None:
    class Server(_Server):
        known = 0

        def find_size(self, span: Span) -> int:
            return self.known

    server = Server()
    server.gate.clear()
    with _open(server, connections=20, memory_bytes=1 << 30) as downloads:
        downloads.prepare(server, [Span("a", 0, WHOLE)])
        _wait_until(lambda: server.n_busy == 1)
        downloads.prepare(server, [Span(f"b{number}", 0, WHOLE) for number in range(14)])
        _wait_until(lambda: server.n_busy == 15)
        server.known = 32 << 20
        downloads.prepare(server, [Span(f"c{number}", 0, WHOLE) for number in range(5)])
        _wait_until(lambda: server.n_busy == 16)  # of 8 requests: with it, there are enough
        assert downloads._queued_bytes == 4 * (32 << 20)


def test_idle_connections_share_the_neighbours() -> None:
    server = _Server()
    with _open(server, connections=4) as downloads:
        downloads.get(server, _spans(*range(8), n_bytes=1 << 20))
        assert len(server.requests) >= 4
        assert sorted(server.requests)[0][1] == 0
        assert sorted(server.requests)[-1][2] == 8 << 20


def test_what_is_waited_for_comes_before_what_was_announced() -> None:
    server = _Server()
    server.gate.clear()
    with _open(server, connections=1) as downloads:
        downloads.prepare(server, [Span(f"told{number}", 0, 1000) for number in range(6)])
        _wait_until(lambda: len(server.requests) == 1)
        reader = threading.Thread(
            target=downloads.get,
            args=(
                server,
                [Span("told4", 0, 1000), Span("other", 0, 1000)],
            ),
        )
        reader.start()
        _wait_until(lambda: len(downloads._urgent) == 2)
        server.gate.set()
        reader.join(_SECONDS)
        _wait_until(lambda: len(server.requests) == 7)
        assert [key for key, *_ in server.requests] == ["told0", "told4", "other", "told1", "told2", "told3", "told5"]


def test_no_more_is_fetched_ahead_than_memory_holds_until_it_is_released() -> None:
    server = _Server()
    with _open(server, memory_bytes=3000) as downloads:
        told = [Span(f"k{number}", 0, 1000) for number in range(6)]
        downloads.prepare(server, told)
        _wait_until(lambda: len(server.requests) == 3 and not server.n_busy)
        downloads.get(server, told[:1])  # what was read may go
        downloads.prepare(server, [])
        _wait_until(lambda: len(server.requests) == 4 and not server.n_busy)
        downloads.release(server, told[1:3])
        _wait_until(lambda: len(server.requests) == 6 and not server.n_busy)
        assert downloads._held_bytes == 3000
        downloads.get(server, [Span("much", 0, 10_000)])  # always
        downloads.release(server, [*told, Span("much", 0, 10_000)])
        assert downloads._held_bytes == downloads._queued_bytes == 0
        assert not downloads._entries


def test_what_was_announced_and_never_read_makes_room_for_another_epoch() -> None:
    server = _Server()
    with _open(server, memory_bytes=3000) as downloads:
        downloads.prepare(server, [Span(f"old{number}", 0, 1000) for number in range(9)])
        _wait_until(lambda: len(server.requests) == 3 and not server.n_busy)
        for number in range(6):
            downloads.get(server, [Span(f"now{number}", 0, 1000)])
        downloads.prepare(server, [Span("next", 0, 1000)])
        _wait_until(lambda: downloads.get(server, [Span("next", 0, 1000)])[2] == 0)
        assert not any(span.key.startswith("old") for _, span in downloads._entries)


def test_what_was_announced_stays_while_readers_wait_for_other_parts_of_it() -> None:
    server = _Server()
    told = [Span(f"k{number}", 0, 1000) for number in range(12)]
    with _open(server, memory_bytes=3000, connections=1) as downloads:
        downloads.prepare(server, told)
        _wait_until(lambda: len(server.requests) == 3 and not server.n_busy)
        for span in told[5:11]:  # announced, and not there yet
            downloads.get(server, [span])
        downloads.get(server, told[:3])
        assert sorted(key for key, *_ in server.requests[:9]) == sorted(f"k{n}" for n in (*range(3), *range(5, 11)))
        assert [key for key, *_ in server.requests].count("k0") == 1


def test_an_error_goes_to_those_who_wait_and_the_next_read_tries_again() -> None:
    server = _Server()
    server.fails = lambda span: ReadError(f"{span.key} failed") if span.key == "bad" else None
    with _open(server) as downloads:
        downloads.prepare(server, [Span("bad", 0, 10)])
        _wait_until(lambda: not downloads._entries)
        for _ in range(2):
            good, bad = downloads.get(server, [Span("good", 0, 10), Span("bad", 0, 10)])[0]
            np.testing.assert_array_equal(good, np.arange(10))
            assert (type(bad), str(bad)) == (ReadError, "bad failed")
        server.fails = lambda _: None
        np.testing.assert_array_equal(downloads.get(server, [Span("bad", 0, 10)])[0][0], np.arange(10))


def test_that_an_object_is_missing_is_asked_for_once() -> None:
    server = _Server()
    server.fails = lambda span: FileNotFoundError(span.key)
    with _open(server) as downloads:
        downloads.prepare(server, [Span("none", 0, WHOLE)])
        _wait_until(lambda: len(server.requests) == 1 and not server.n_busy)
        assert isinstance(downloads.get(server, [Span("none", 0, WHOLE)])[0][0], FileNotFoundError)
        assert len(server.requests) == 1
        assert not downloads._entries
        assert downloads._held_bytes == 0


def test_closing_ends_a_reader_that_waits() -> None:
    server = _Server()
    server.gate.clear()
    downloads = Downloads(connections=2, memory_bytes=1 << 20)
    errors: list[object] = []

    def read() -> None:
        errors.extend(downloads.get(server, _spans(1))[0])

    reader = threading.Thread(target=read)
    reader.start()
    _wait_until(lambda: len(server.requests) == 1)
    downloads.close(server)
    reader.join(_SECONDS)
    assert [type(error) for error in errors] == [ReadError]
    server.gate.set()
    _wait_until(lambda: not server.n_busy)
    with pytest.raises(ReadError, match="closed"):
        downloads.get(server, _spans(2))


def test_a_thread_that_is_woken_as_its_time_runs_out_still_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    server = _Server()
    with _open(server, connections=1) as downloads:
        wait = downloads._work.wait
        monkeypatch.setattr(downloads_module, "_IDLE_SECONDS", 0.001)
        monkeypatch.setattr(downloads._work, "wait", lambda _: wait(_SECONDS) and False)  # until woken, yet too late
        downloads.get(server, _spans(0))
        _wait_until(lambda: downloads._n_idle == 1)
        reader = threading.Thread(target=downloads.get, args=(server, _spans(1)), daemon=True)
        reader.start()
        reader.join(_SECONDS)
        assert server.requests == [("a", 0, 1000), ("a", 1000, 2000)]


def test_a_folder_that_is_collected_by_a_thread_with_the_lock_is_closed_by_the_next_call() -> None:
    server, dropped = _Server(), _Server()

    class Holder:
        """Refers to itself, so that it is dropped when garbage is collected."""

        def __init__(self) -> None:
            self.me = self
            weakref.finalize(self, downloads.close, dropped)

    class Collecting(_Server):
        def find_size(self, span: Span) -> int:  # asked for under the lock
            gc.collect()
            return super().find_size(span)

    collecting = Collecting()
    with _open(server) as downloads:
        downloads.get(dropped, _spans(0))
        Holder()
        found, *_ = downloads.get(collecting, _spans(1))
        np.testing.assert_array_equal(found[0], _content(_spans(1)[0]))
        downloads.get(server, _spans(2))
        assert {owner for owner, _ in downloads._entries} == {collecting, server}
        with pytest.raises(ReadError, match="was closed"):
            downloads.get(dropped, _spans(0))
        downloads.close(collecting)
