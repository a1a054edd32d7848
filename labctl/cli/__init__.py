"""The command line: the only place that parses arguments, prints, asks questions or exits.

A command's module is imported when the command is called. `labctl --help` imports only click and
`groups.py`; a plain `labctl ssh` or `labctl exec` does not even import click. A shell that
completes a command line calls labctl without arguments, and `completion_values.py` answers it.

May import: every layer below; not the agent.
"""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command on the command line and exit with its code."""
    # Imported modules are never garbage. Collecting while they load, and again at exit, would
    # cost a short command 20 ms.
    gc.set_threshold(50_000)
    if sys.argv[1:2] in (["ssh"], ["exec"]):
        from labctl.cli.plain_ssh import try_plain_exec, try_plain_ssh

        (try_plain_ssh if sys.argv[1] == "ssh" else try_plain_exec)(sys.argv[2:])
    if len(sys.argv) == 1:
        from labctl.config.user_shell import is_completion_request

        if is_completion_request():
            from labctl.cli.completion_values import answer_shell

            sys.exit(answer_shell())
    from labctl.cli.exit_codes import run_and_exit
    from labctl.cli.groups import cli

    code = run_and_exit(cli)
    gc.freeze()
    sys.exit(code)
