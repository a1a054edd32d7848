"""cp: one file to or from the server."""

from __future__ import annotations

import re
from pathlib import Path

import click

from labctl.cli.completion_values import complete_files
from labctl.cli.options import SERVER, json_option, open_lab
from labctl.cli.tables import print_json
from labctl.errors import UsageError
from labctl.shell import command
from labctl.sync.single_file import download_file, upload_file
from labctl.text import bytes_text

# A path on the server, perhaps with a misspelled name of the lab.
_OTHER_LAB = re.compile(r"[^/:]*:")


@click.command("cp")
@SERVER
@json_option
@click.argument("source", shell_complete=complete_files)
@click.argument("target", shell_complete=complete_files)
@click.pass_context
def cp_command(ctx: click.Context, source: str, target: str, rank: int, json_: bool) -> None:
    """Copy one file to or from the lab's server.

    Write the path on the server as LAB:PATH. A relative PATH is below the home directory there.
    Use `labctl push` for code and data, `labctl pull` for the outputs of runs.

    \b
    labctl cp notes.txt digits:notes/
    labctl cp digits:labctl/digits/code/result.csv .
    """
    lab = open_lab(ctx, quiet=json_)
    prefix = f"{lab.config.name}:"
    if source.startswith(prefix) == target.startswith(prefix):
        raise UsageError(
            f"either the source or the target has to begin with {prefix}",
            why=f"got {source} and {target}",
            hint=_suggest_copy(source, target, prefix),
        )
    context = lab.select_server(rank).context
    server = context.get_server()
    transport, reporter = context.open_agent(server).transport, context.reporter
    if target.startswith(prefix):
        path = _find_server_path(target, prefix) or "."
        size_bytes = upload_file(transport, Path(source), path, reporter, server.alias)
    else:
        path = _find_server_path(source, prefix)
        size_bytes = download_file(transport, path, Path(target), reporter, server.alias)
    if json_:
        print_json({"source": source, "target": target, "size_bytes": size_bytes})
        return
    click.echo(f"copied {source} to {target} ({bytes_text(size_bytes)})")


def _suggest_copy(source: str, target: str, prefix: str) -> str:
    """Return the command that was probably meant, where neither or both paths have the prefix."""
    if source.startswith(prefix):
        return command("labctl", "cp", source, ".").render()
    if _OTHER_LAB.match(target) or (Path(source).is_file() and not _OTHER_LAB.match(source)):
        return command("labctl", "cp", source, prefix + _OTHER_LAB.sub("", target)).render()
    return command("labctl", "cp", prefix + _OTHER_LAB.sub("", source), target).render()


def _find_server_path(argument: str, prefix: str) -> str:
    """Return the path after `LAB:`. SFTP starts in the home directory and does not know `~`."""
    path = argument.removeprefix(prefix)
    return "" if path == "~" else path.removeprefix("~/")
