"""The command line: the only place that parses arguments, prints, asks questions or exits.

A command's module is imported when the command is called. `labctl --help` imports only click and
`groups.py`; a plain `labctl ssh` does not even import click.

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
    if len(sys.argv) > 1 and sys.argv[1] == "ssh":
        from labctl.cli.plain_ssh import try_plain_ssh

        try_plain_ssh(sys.argv[2:])
    from labctl.cli.exit_codes import run_and_exit
    from labctl.cli.groups import cli

    code = run_and_exit(cli)
    gc.freeze()
    sys.exit(code)
