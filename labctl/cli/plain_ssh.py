"""`labctl ssh` and `labctl exec` in their plain forms, without click and what others need.

A warm connection answers in about 15 ms, so most of such a call is Python's start-up.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from labctl.commands.ssh import interactive_argv
from labctl.errors import LabError
from labctl.events import Event, Question
from labctl.lazy import lazy_imports
from labctl.shell import command as render_words
from labctl.shell import portable_line

if TYPE_CHECKING:
    from labctl.model import Run
    from labctl.servers.context import LabContext

with lazy_imports(__name__):
    from labctl import lab as lab_module
    from labctl.cli import screen
    from labctl.commands import run_shell
    from labctl.servers import firewall
    from labctl.state import disks
    from labctl.transports import ssh_client


# programs that a server without a GPU does not have
ABOUT_THE_GPU = frozenset(("nvidia-smi", "nvtop"))


class DeferredScreen:
    """A Reporter that creates the screen, which needs click, when there is something to show."""

    def emit(self, event: Event) -> None:
        screen.Screen().emit(event)

    def confirm(self, decision: Question) -> bool:
        return screen.Screen().confirm(decision)


def try_plain_ssh(words: Sequence[str]) -> None:
    """Replace this process with ssh to the server of the lab that this directory is in.

    `words` follow `labctl ssh`. Returns if they have an option of labctl, if the lab needs more
    than its record (an expired disk, a firewall), or if anything is wrong: the command itself then
    does the same again, and reports it.
    """
    command = parse_plain_command(words)
    if command is None:
        return
    try:
        lab = _load_reachable_lab()
        if lab is not None:
            replace_with_ssh(lab.context, remote_line(command), tty=needs_tty(command))
    except LabError:
        return


def try_plain_exec(words: Sequence[str]) -> None:
    """Replace this process with ssh that runs a command in a run's container.

    `words` follow `labctl exec`. Returns, as `try_plain_ssh` does, if the command itself must look;
    also for a run that is not recorded as running.
    """
    call = parse_plain_exec(words)
    if call is None:
        return
    name, command = call
    try:
        lab = _load_reachable_lab()
        if lab is None:
            return
        state = lab.context.state
        run = state.get_run(lab.id, name) if name else state.get_latest_run(lab.id)
        if run is None or run.state != "running" or not run.container:
            return
        if name or not run.is_auxiliary:
            replace_with_exec(lab.context, run, command)
    except LabError:
        return


def _load_reachable_lab() -> lab_module.Lab | None:
    """Load the lab that this directory is in; None if reaching its server needs more than ssh."""
    lab = lab_module.Lab.load(".", reporter=DeferredScreen(), record_only=True, in_process=False)
    if disks.has_expired(lab.context.state, lab.id, lab.config.server.provider):
        return None
    return None if firewall.has_firewall(lab.context.get_server()) else lab


def parse_plain_command(words: Sequence[str]) -> tuple[str, ...] | None:
    """Return the command of `labctl ssh [--] COMMAND`; None if an option comes before it."""
    if words and words[0] == "--":
        return tuple(words[1:])
    return None if words and words[0].startswith("-") else tuple(words)


def parse_plain_exec(words: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return run ("" for the latest) and command of `labctl exec [RUN] -- COMMAND`.

    None for anything else, which is an option or a mistake, or needs a look at the server's GPUs.
    """
    before, separator, command = _split(words)
    if not separator or len(before) > 1 or not command or command[0] in ABOUT_THE_GPU:
        return None
    if any(word.startswith("-") for word in (*before, command[0])):
        return None
    return (before[0] if before else ""), command


def _split(words: Sequence[str]) -> tuple[tuple[str, ...], bool, tuple[str, ...]]:
    """Return the words before `--`, whether it is there, and the words after it."""
    cut = words.index("--") if "--" in words else len(words)
    return tuple(words[:cut]), cut < len(words), tuple(words[cut + 1 :])


def remote_line(command: Sequence[str]) -> str:
    """Return the line for the server's shell; "" for a login shell.

    One word is a line already, as with ssh. Several are an argv and are quoted. A line that is one
    program first looks for it: the shell's own message names labctl's wrapper and its line numbers.
    """
    if not command or (len(command) == 1 and not re.fullmatch("[A-Za-z0-9_./+-]+", command[0])):
        return "".join(command)
    line = render_words(*command).render()
    found = render_words("command", "-v", command[0]).render()
    missing = render_words("printf", "%s\\n", f"{command[0]}: command not found").render()
    return f"{found} >/dev/null 2>&1 || {{ {missing} >&2; exit 127; }}\n{line}"


def needs_tty(command: Sequence[str]) -> bool:
    return not command or (sys.stdin.isatty() and sys.stdout.isatty())


def replace_with_exec(context: LabContext, run: Run, command: Sequence[str]) -> None:
    """Replace this process with ssh that runs `command` beside `run`, in its environment."""
    tty = needs_tty(command)
    line = run_shell.build_exec_line(run.executor_name, run.id, run.container, command, tty=tty)
    replace_with_ssh(context, line, tty=tty)


def replace_with_ssh(context: LabContext, line: str, *, tty: bool = True) -> None:
    """Replace this process with ssh to the lab's server, with its exit code and signals.

    `line` is for the shell on the server; "" opens a login shell.
    """
    argv = build_ssh_argv(context, line, tty=tty)
    sys.stdout.flush()
    try:
        os.execvp(argv[0], argv)
    except FileNotFoundError:
        raise make_missing_ssh_error() from None


def build_ssh_argv(context: LabContext, line: str, *, tty: bool = True) -> list[str]:
    """Return the ssh command that runs `line` on the lab's server with the user's terminal."""
    server = context.get_server()
    if firewall.has_firewall(server):
        firewall.admit_if_unreachable(context, server)
    config = context.connections.write(server)
    return interactive_argv(
        str(config),
        server.id,
        portable_line(line) if line else "",
        runtime_dir=str(ssh_client.runtime_dir()),
        tty=tty,
        login=ssh_client.find_quick_login_options(),
    )


def make_missing_ssh_error() -> LabError:
    return LabError(
        "ssh is not installed on this machine", hint="sudo apt-get install openssh-client"
    )
