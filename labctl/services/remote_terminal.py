"""A shell on a server in a terminal of this machine, for a program that passes it on."""

from __future__ import annotations

import contextlib
import os
import pty
import shlex
import signal
import subprocess
import termios
from collections.abc import Sequence

from labctl.commands.ssh import terminal_argv
from labctl.model import Server
from labctl.servers.context import LabContext
from labctl.shell import portable_line
from labctl.transports.ssh_client import spawn_ssh

READ_BYTES = 65_536
END_S = 3.0


class RemoteTerminal:
    """One process, usually ssh, with a terminal of its own. For one thread at a time."""

    def __init__(self, argv: Sequence[str], columns: int, rows: int) -> None:
        self._master, slave = pty.openpty()
        try:
            termios.tcsetwinsize(slave, (rows, columns))
            self._process = spawn_ssh(argv, slave)
        except BaseException:
            os.close(self._master)
            raise
        finally:
            os.close(slave)
        os.set_blocking(self._master, False)

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is output; it does not block."""
        return self._master

    def read(self) -> bytes:
        """Return what was printed; b"" once the process has ended. BlockingIOError if nothing."""
        try:
            return os.read(self._master, READ_BYTES)
        except BlockingIOError:
            raise
        except OSError:  # EIO: no process has the terminal any more
            return b""

    def write(self, data: bytes) -> int:
        """Type `data`; return how many bytes were taken. BlockingIOError if none was."""
        return os.write(self._master, data)

    def resize(self, columns: int, rows: int) -> None:
        termios.tcsetwinsize(self._master, (rows, columns))
        # The terminal is not the process's controlling one, so the kernel does not tell it.
        self._process.send_signal(signal.SIGWINCH)

    def close(self) -> None:
        """End the process, which closes the terminal on the server; a tmux session stays."""
        with contextlib.suppress(OSError):
            os.close(self._master)
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def open_server_terminal(
    lab: LabContext, server: Server, session: str, columns: int, rows: int
) -> RemoteTerminal:
    """Open the tmux session of this name on a server, in the lab's code; create it if missing.

    It has a connection of its own. Without tmux on the server, it is the login shell.
    """
    line = portable_line(build_terminal_line(lab.config.name, lab.lab_id, session))
    argv = terminal_argv(str(lab.connections.write(server)), server.id, line)
    return RemoteTerminal(argv, columns, rows)


def build_terminal_line(lab: str, lab_id: str, session: str) -> str:
    """Build the line for the server's shell. A lab's directory has its id if its name is taken.

    A new lab has no code yet. Its directory is created, since only files in it are submitted.
    """
    plain, with_id = (
        f'"$HOME"/labctl/{shlex.quote(name)}' for name in (lab, f"{lab}-{lab_id[:6]}")
    )
    return (
        f"for lab in {with_id} {plain}; do "
        f'[ "$(cat "$lab/.labctl/id" 2>/dev/null)" = {shlex.quote(lab_id)} ] '
        '&& mkdir -p "$lab/code" 2>/dev/null; done; '
        f"cd {with_id}/code 2>/dev/null || cd {plain}/code 2>/dev/null || cd; "
        "export TERM=xterm-256color; "
        f"command -v tmux >/dev/null && exec tmux -u new-session -A -s {shlex.quote(session)} "
        r"\; set-option mouse on \; set-option status off; "
        'exec "${SHELL:-/bin/sh}" -l'
    )
