"""The command completion: what makes a shell complete labctl's command lines."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from labctl.config import copy_environment, find_paths
from labctl.config.user_shell import (
    COMPLETE_VARIABLE,
    find_fish_completions,
    find_shell_name,
    find_startup_file,
)
from labctl.errors import LabError, UsageError
from labctl.lazy import lazy_imports

if TYPE_CHECKING:
    from collections.abc import Mapping

with lazy_imports(__name__):
    from click import shell_completion

    from labctl.cli import groups

SHELLS = ("bash", "zsh", "fish")
# What precedes click's script in the file that a startup file reads: older ones of bash lack an
# option that the script uses, and a zsh without a .zshrc has not loaded its completions.
PREFACES = {
    "bash": "((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || return 0\n",
    "zsh": "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }\n",
    "fish": "",
}


@click.command("completion")
@click.argument("shell", required=False, type=click.Choice(SHELLS), metavar="[SHELL]")
@click.option("--install", is_flag=True, help="Set up completion for every new shell.")
def completion_command(shell: str | None, install: bool) -> None:
    """Make the Tab key complete commands, options, runs, services and providers.

    SHELL is bash, zsh or fish (default: your login shell). --install writes labctl's script to a
    file, and for bash and zsh adds one line to ~/.bashrc or ~/.zshrc. Without --install, labctl
    prints the script.

    \b
    labctl completion --install
    labctl completion --install fish
    """
    environ = copy_environment()
    shell = shell or _find_own_shell(environ)
    script = build_script(shell)
    if not install:
        click.echo(script, nl=False)
        return
    file = _install(shell, script, environ)
    click.echo(f"\nNew shells complete labctl. For this one:\n\n  . {shlex.quote(str(file))}")


def build_script(shell: str) -> str:
    """Return click's script, which asks labctl for the completions of a command line."""
    kind = shell_completion.get_completion_class(shell)
    if kind is None:
        raise ValueError(f"click does not know {shell}")
    script = kind(groups.cli, {}, "labctl", COMPLETE_VARIABLE).source()
    # Only the first comma separates: the others belong to the description.
    return script.replace('string split ","', 'string split --max 1 ","')


def _find_own_shell(environ: Mapping[str, str]) -> str:
    shell = find_shell_name(environ)
    if shell not in SHELLS:
        raise UsageError(
            "labctl does not know which shell to complete in",
            why=f"your login shell ($SHELL) is {shell or 'not set'}; "
            f"labctl has scripts for {', '.join(SHELLS)}",
            hint="labctl completion --install bash",
        )
    return shell


def _install(shell: str, script: str, environ: Mapping[str, str]) -> Path:
    """Write the script to its file, and have the shell read it; return the file."""
    if shell == "fish":
        file = find_fish_completions(environ) / "labctl.fish"
        _write(file, PREFACES[shell] + script, shell)
        click.echo(f"wrote {file}")
        return file
    file = find_paths(environ).completion_dir / f"labctl.{shell}"
    _write(file, PREFACES[shell] + script, shell)
    click.echo(f"wrote {file}")
    startup = find_startup_file(shell, environ)
    if _add_line(startup, file, shell):
        click.echo(f"added a line to {startup}")
    return file


def _write(file: Path, text: str, shell: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    except OSError as error:
        raise _make_write_error(file, error, shell) from error


def _add_line(startup: Path, file: Path, shell: str) -> bool:
    """Have the startup file read `file`; False if it does so already.

    The line is appended, since the startup file may be a link into the user's own repository.
    """
    quoted = shlex.quote(str(file))
    try:
        text = startup.read_bytes() if startup.exists() else b""
        if str(file).encode() in text:
            return False
        line = f"[ -r {quoted} ] && . {quoted}  # labctl completion\n".encode()
        with startup.open("ab") as stream:
            stream.write(line if not text or text.endswith(b"\n") else b"\n" + line)
    except OSError as error:
        raise _make_write_error(startup, error, shell) from error
    return True


def _make_write_error(file: Path, error: OSError, shell: str) -> LabError:
    return LabError(
        f"cannot write {file}",
        why=f"{error.strerror}; completion can also be switched on for a single shell",
        hint="labctl completion fish   # and pipe it into `source`"
        if shell == "fish"
        else f'eval "$(labctl completion {shell})"',
    )
