"""The command line: the only place that parses arguments, prints, asks questions or exits.

A command's module is imported when the command is called. `labctl --help` imports only click and
`groups.py`; a plain `labctl ssh` or `labctl exec` does not even import click. A shell that
completes a command line calls labctl without arguments, and `completion_values.py` answers it.

May import: every layer below; not the agent.
"""

from __future__ import annotations

import gc
import sys

from labctl.lazy import lazy_imports

with lazy_imports(__name__):
    from labctl.cli import completion_values, exit_codes, groups, plain_ssh
    from labctl.config import user_shell


def main() -> None:
    """Run the command on the command line and exit with its code."""
    # Imported modules are never garbage. Collecting while they load, and again at exit, would
    # cost a short command 20 ms.
    gc.set_threshold(50_000)
    if sys.argv[1:2] == ["ssh"]:
        plain_ssh.try_plain_ssh(sys.argv[2:])
    if sys.argv[1:2] == ["exec"]:
        plain_ssh.try_plain_exec(sys.argv[2:])
    if len(sys.argv) == 1 and user_shell.is_completion_request():
        sys.exit(completion_values.answer_shell())
    code = exit_codes.run_and_exit(groups.cli)
    gc.freeze()
    sys.exit(code)
