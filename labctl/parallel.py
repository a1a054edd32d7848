"""Run the parts of a flow side by side, each in a thread, and end all of them together.

A thread cannot be killed. So code that waits in a part (for a process, a lock, an answer) uses
`on_cancel` or `is_canceled` to end its wait. Outside of parts, both do nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any, TypeVar

from labctl.lazy import lazy_imports

if TYPE_CHECKING:
    from concurrent.futures import Future

with lazy_imports(__name__):
    import queue
    from concurrent import futures

T = TypeVar("T")


class CanceledError(Exception):
    """The part must end, since another one failed or the user interrupted all of them."""


def run_parts(parts: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Run named parts side by side; return their results by name once all of them have ended.

    The first part that fails cancels the others, and its error is raised. If several fail at once,
    the error of the earliest in `parts` is raised. An interrupt of the calling thread cancels all.
    """
    group = _Group()
    with on_cancel(group.cancel):
        return group.run(parts)


def wait_for(name: str) -> None:
    """Wait in a part until the part `name` has ended; CanceledError if that one failed."""
    group = _current.get()
    if group is None:
        raise RuntimeError(f"wait_for({name!r}) was called outside of run_parts")
    group.wait_for(name)


@contextmanager
def on_cancel(end: Callable[[], object]) -> Iterator[None]:
    """Call `end`, in another thread, if the part of this thread is canceled inside the block.

    CanceledError if the part was canceled before.
    """
    group = _current.get()
    if group is None:
        yield
        return
    key = group.add_hook(end)
    try:
        yield
    finally:
        group.remove_hook(key)


def is_canceled() -> bool:
    """Return whether the part of this thread must end."""
    group = _current.get()
    return group is not None and group.is_canceled


def call_in_caller(function: Callable[[], T]) -> T:
    """Call a function in the thread that waits for the parts, and return its result.

    Questions to the user run there, since Ctrl-C interrupts no other thread.
    """
    group = _current.get()
    return function() if group is None else group.call_in_caller(function)


def start_daemon(function: Callable[[], T]) -> Future[T]:
    """Run a function in a daemon thread beside this one; `result` waits for it.

    For work that may be abandoned: when the process ends, it does not wait for the function, as it
    would for a thread of an executor.
    """
    future: Future[T] = futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # raised again by `result`
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class _Group:
    """Parts that run side by side. `run` is called once; other threads may call the rest."""

    def __init__(self) -> None:
        self.is_canceled = False
        self._lock = threading.RLock()
        self._hooks: dict[object, Callable[[], object]] = {}
        self._futures: dict[str, Future[Any]] = {}
        # Functions for the calling thread; None says that a part has ended.
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def run(self, parts: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        with futures.ThreadPoolExecutor(len(parts), "labctl-part") as threads:
            try:
                with self._lock:
                    for name, part in parts.items():
                        self._futures[name] = threads.submit(copy_context().run, self._run, part)
                for future in self._futures.values():
                    future.add_done_callback(lambda _: self._calls.put(None))
                errors = self._serve_until_end()
            finally:
                # This has no effect if all parts have ended.
                self.cancel()
        if errors:
            raise next((e for e in errors if not isinstance(e, CanceledError)), errors[0])
        return {name: future.result() for name, future in self._futures.items()}

    def _run(self, part: Callable[[], T]) -> T:
        _current.set(self)
        return part()

    def _serve_until_end(self) -> list[BaseException]:
        """Call functions for the parts until all have ended or one failed; return the errors."""
        while True:
            ended = [future for future in self._futures.values() if future.done()]
            errors = [error for future in ended if (error := future.exception()) is not None]
            if errors or len(ended) == len(self._futures):
                return errors
            if (call := self._calls.get()) is not None:
                call()

    def cancel(self) -> None:
        """End what the parts wait for."""
        with self._lock:
            self.is_canceled = True
            for end in self._hooks.values():
                # To close a channel of a lost connection fails. The other parts must end anyway,
                # and the first error is the one to report.
                with suppress(Exception):
                    end()
            self._hooks.clear()

    def add_hook(self, end: Callable[[], object]) -> object:
        with self._lock:
            if self.is_canceled:
                raise CanceledError
            key = object()
            self._hooks[key] = end
            return key

    def remove_hook(self, key: object) -> None:
        with self._lock:
            self._hooks.pop(key, None)

    def wait_for(self, name: str) -> None:
        with self._lock:
            future = self._futures[name]
        if future.exception() is not None:
            raise CanceledError

    def call_in_caller(self, function: Callable[[], T]) -> T:
        answer: futures.Future[T] = futures.Future()

        def call() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(call_in_caller(function))
            except BaseException as error:  # also an interrupt, which ends the part that asked
                answer.set_exception(error)

        with on_cancel(answer.cancel):
            self._calls.put(call)
            try:
                return answer.result()
            except futures.CancelledError:
                raise CanceledError from None


_current: ContextVar[_Group | None] = ContextVar("labctl_parts", default=None)
