"""`labctl ssh` in its plain form, without click and without what other commands need.

A warm connection answers in about 15 ms, so most of such a call is Python's start-up.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from labctl.commands.ssh import interactive_argv
from labctl.errors import LabError
from labctl.events import Event, Question
from labctl.shell import command as render_words
from labctl.shell import portable_line

if TYPE_CHECKING:
    from labctl.servers.context import LabContext


class DeferredScreen:
    """A Reporter that creates the screen, which needs click, when there is something to show."""

    def emit(self, event: Event) -> None:
        from labctl.cli.screen import Screen

        Screen().emit(event)

    def confirm(self, decision: Question) -> bool:
        from labctl.cli.screen import Screen

        return Screen().confirm(decision)


def try_plain_ssh(words: Sequence[str]) -> None:
    """Replace this process with ssh to the server of the lab that this directory is in.

    `words` follow `labctl ssh`. Returns if they have an option of labctl, if the lab needs more
    than its record (an expired disk, a firewall), or if anything is wrong: the command itself then
    does the same again, and reports it.
    """
    command = parse_plain_command(words)
    if command is None:
        return
    from labctl.lab import Lab
    from labctl.servers.gate import has_gate
    from labctl.state.disks import has_expired

    try:
        lab = Lab.load(".", reporter=DeferredScreen(), record_only=True, in_process=False)
        if has_expired(lab.context.state, lab.id, lab.config.server.provider):
            return
        if not has_gate(lab.context.get_server()):
            replace_with_ssh(lab.context, remote_line(command), tty=needs_tty(command))
    except LabError:
        return


def parse_plain_command(words: Sequence[str]) -> tuple[str, ...] | None:
    """Return the command of `labctl ssh [--] COMMAND`; None if an option comes before it."""
    if words and words[0] == "--":
        return tuple(words[1:])
    return None if words and words[0].startswith("-") else tuple(words)


def remote_line(command: Sequence[str]) -> str:
    """Return the line for the server's shell; "" for a login shell.

    One word is a line already, as with ssh. Several are an argv and are quoted.
    """
    return command[0] if len(command) == 1 else render_words(*command).render()


def needs_tty(command: Sequence[str]) -> bool:
    return not command or (sys.stdin.isatty() and sys.stdout.isatty())


def replace_with_ssh(context: LabContext, line: str, *, tty: bool = True) -> None:
    """Replace this process with ssh to the lab's server, with its exit code and signals.

    `line` is for the shell on the server; "" opens a login shell.
    """
    from labctl.servers.gate import admit_if_unreachable, has_gate
    from labctl.transports.ssh_client import find_quick_login_options

    server = context.get_server()
    if has_gate(server):
        admit_if_unreachable(context, server)
    config = context.connections.write(server)
    if not shutil.which("ssh"):
        raise LabError(
            "ssh is not installed on this machine", hint="sudo apt-get install openssh-client"
        )
    argv = interactive_argv(
        str(config),
        server.alias,
        portable_line(line) if line else "",
        tty=tty,
        login=find_quick_login_options(),
    )
    sys.stdout.flush()
    os.execvp(argv[0], argv)
