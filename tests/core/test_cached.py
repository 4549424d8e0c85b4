"""Properties that are worked out once, also in a process that was forked meanwhile."""

import os
import threading

from penstock_test_parts import run_isolated

from penstock.core.cached import cached_property


class _Slow:
    def __init__(self, begun: threading.Event, go: threading.Event) -> None:
        self._begun, self._go = begun, go
        self.n_calls = 0

    @cached_property
    def value(self) -> int:
        self.n_calls += 1
        self._begun.set()
        self._go.wait(60)
        return 7


def fork_meanwhile() -> int:
    """Fork while a thread works a value out; return how the child ended, which asks another object for its own."""
    begun, go, free = threading.Event(), threading.Event(), threading.Event()
    free.set()
    thread = threading.Thread(target=lambda: _Slow(begun, go).value)
    thread.start()
    begun.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(_Slow(threading.Event(), free).value)
    _, status = os.waitpid(child, 0)
    go.set()
    thread.join()
    return os.waitstatus_to_exitcode(status)


def test_a_forked_process_does_not_wait_for_a_thread_of_its_parent() -> None:
    assert run_isolated(fork_meanwhile) == 7


def test_a_value_is_worked_out_once() -> None:
    free = threading.Event()
    free.set()
    slow = _Slow(threading.Event(), free)
    assert [slow.value, slow.value, slow.n_calls] == [7, 7, 1]
