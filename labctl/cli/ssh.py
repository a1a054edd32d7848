"""The command ssh."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from labctl.cli.options import SERVER, SSH_AT_ONCE, SSH_JSON, open_lab
from labctl.cli.plain_ssh import needs_tty, remote_line, replace_with_ssh
from labctl.errors import LabError, UsageError
from labctl.lazy import lazy_imports

with lazy_imports(__name__):
    from labctl import config
    from labctl.cli import fan_out


class _SshCommand(click.Command):
    """`labctl ssh`, which has no option of OpenSSH: those go to the user's own ssh."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name.startswith("--"):
                raise  # OpenSSH has no such option either
            try:
                name = config.load_lab(Path(ctx.find_root().obj or ".")).name
            except LabError:
                name = "HOST"
            line = shlex.join(["ssh", *words[: words.index("--") if "--" in words else None], name])
            raise UsageError(
                f"labctl ssh has no option {error.option_name}",
                why="options of OpenSSH work with ssh itself, which knows the server by its name",
                hint=f"{line}\nlabctl ssh --help",
            ) from None


@click.command(
    "ssh",
    cls=_SshCommand,
    # Everything after the first word of COMMAND belongs to COMMAND, even `--all`.
    context_settings={"allow_interspersed_args": False},
)
@click.option("--all", "all_", is_flag=True, help="Run COMMAND on the servers of all labs.")
@SERVER
@SSH_AT_ONCE
@SSH_JSON
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND]")
@click.pass_context
def ssh_command(
    ctx: click.Context,
    all_: bool,
    rank: int,
    at_once: int,
    json_: bool,
    command: tuple[str, ...],
) -> None:
    """Open a shell on the server, or run COMMAND there.

    With --all, COMMAND runs on the servers of all labs in parallel. The output is grouped by
    server, in order of name, and a list of failures follows. Exits with the highest exit code, or
    with 255 if a server could not be reached.

    \b
    labctl ssh
    labctl ssh -- df -h
    labctl ssh 'nvidia-smi | head'
    labctl ssh --all -- nvidia-smi -L
    """
    line = remote_line(command)
    if not all_:
        if json_:
            raise UsageError("--json needs --all", hint="labctl ssh --all --json -- COMMAND")
        replace_with_ssh(open_lab(ctx, rank=rank).context, line, tty=needs_tty(command))
    if not command:
        raise UsageError("--all needs a command", hint="labctl ssh --all -- uptime")
    ctx.exit(fan_out.run_on_all_servers(line, at_once, json_))
