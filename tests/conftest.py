"""What every test stands on."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    # A shell's background job ignores Ctrl-C, and so would every program that a test starts and
    # interrupts: an ignored signal stays ignored in what is executed, a handler does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
