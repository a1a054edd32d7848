"""How a run ended, in words for users."""

from __future__ import annotations

import signal

from ...wire.text import bytes_text

SERVER_MEMORY = "the server's memory"


def describe_exit(
    code: int,
    *,
    oom_kills: int = 0,
    peak_memory_bytes: int = 0,
    memory_bytes: int = 0,
    cancelled: bool = False,
    memory_name: str = SERVER_MEMORY,
) -> str:
    """Describe in words how a run ended. `memory_bytes` is its limit, 0 for `memory_name`."""
    if oom_kills > 0 and code != 0:
        limit_text = f"its limit of {bytes_text(memory_bytes)}" if memory_bytes else memory_name
        peak_text = f" (peak {bytes_text(peak_memory_bytes)})" if peak_memory_bytes else ""
        return f"out of memory: killed at {limit_text}{peak_text}"
    if cancelled:
        ending = find_signal_name(code - 128) if code > 128 else ""
        return f"canceled ({ending or f'exit code {code}'})"
    if code == 0:
        return "done"
    if code == 127:
        return "exit 127: the command was not found in the image"
    if code == 126:
        return "exit 126: the command was found but cannot be executed"
    if code > 128 and find_signal_name(code - 128):
        return f"ended by {find_signal_name(code - 128)} (exit {code})"
    return f"failed with exit code {code}"


def find_signal_name(number: int) -> str:
    """Return the name of a signal, for example SIGTERM; "" for an unknown number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""
