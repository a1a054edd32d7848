"""Values that the Tab key offers: runs, services, providers, templates and files.

They come from this machine's record and from lab.yaml. Nothing here connects or writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from labctl.errors import LabError
from labctl.lazy import lazy_imports

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from labctl.model import Forward, Run

with lazy_imports(__name__):
    from click import shell_completion

    from labctl import config, providers, state
    from labctl.cli import exit_codes, groups
    from labctl.config import documentation, user_shell
    from labctl.lifecycle import project_templates


def answer_shell() -> int:
    """Print the completions that a shell asks for and return the exit code.

    A failure means no completions: a message would end up in the line that the user types.
    """
    try:
        groups.cli.main(
            standalone_mode=False, prog_name="labctl", complete_var=user_shell.COMPLETE_VARIABLE
        )
    except SystemExit as end:  # how click ends after its reply
        return end.code if isinstance(end.code, int) else 0
    except (Exception, KeyboardInterrupt):
        return 1
    return 0


def complete_runs(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Offer the lab's runs on record, the newest first. A second word is no run."""
    if ctx.params.get(param.name or "") and param.nargs == -1:
        return []
    runs = reversed(_list_runs(ctx))
    helps = {run.id: exit_codes.clean(" ".join(run.summary.split())) for run in runs}
    return _match(helps, incomplete, helps)


def complete_services(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Offer the services that can be forwarded; with --stop, the background forwards."""
    if ctx.params.get("stop"):
        forwards = _list_forwards(ctx)
        names = [*(one.service for one in forwards), *(one.id for one in forwards)]
    else:
        names = _list_services(ctx)
    typed = ctx.params.get(param.name or "") or ()
    return _match([name for name in dict.fromkeys(names) if name not in typed], incomplete)


def complete_providers(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Offer the installed providers."""
    return _match(providers.list_provider_names(), incomplete)


def complete_templates(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Offer the sample projects, each with what it teaches."""
    return _match(
        project_templates.PROJECT_TEMPLATES, incomplete, project_templates.PROJECT_TEMPLATES
    )


def complete_pages(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Offer the pages of the documentation, each with its title."""
    pages = documentation.list_pages()
    return _match(pages, incomplete, {name: documentation.find_title(name) for name in pages})


def complete_files(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[shell_completion.CompletionItem[str]]:
    """Let the shell offer files, as it does for commands that it has no completions for."""
    return [shell_completion.CompletionItem(incomplete, type="file")]


def _match(
    names: Iterable[str], incomplete: str, helps: dict[str, str] | None = None
) -> list[shell_completion.CompletionItem[str]]:
    return [
        shell_completion.CompletionItem(name, help=(helps or {}).get(name) or None)
        for name in names
        if name.startswith(incomplete)
    ]


def _find_lab_dir(ctx: click.Context) -> Path:
    """Return the directory of the lab. The callback that sets ctx.obj is not called here."""
    path = config.find_lab(Path(ctx.find_root().params.get("directory") or "."))
    return path if path.is_dir() else path.parent


def _open_state() -> state.State:
    return state.State(config.find_paths().database, read_only=True)


def _list_runs(ctx: click.Context) -> list[Run]:
    lab_id = config.read_lab_id(_find_lab_dir(ctx))
    if not lab_id:
        return []
    with _open_state() as state:
        return state.list_runs(lab_id)


def _list_forwards(ctx: click.Context) -> list[Forward]:
    """List the background forwards of the lab; with --all those of all labs."""
    lab_id = "" if ctx.params.get("all_") else config.read_lab_id(_find_lab_dir(ctx))
    with _open_state() as state:
        servers = {server.id for server in state.list_servers(lab_id or None)}
        return [one for one in state.list_forwards() if one.server_id in servers]


def _list_services(ctx: click.Context) -> list[str]:
    """List the services of lab.yaml and those that every lab has."""
    try:
        own = config.load_lab(_find_lab_dir(ctx)).services
    except LabError:  # no lab, or a lab.yaml with mistakes, which other commands report
        own = {}
    return [*own, *(name for name in config.KNOWN_SERVICE_PORTS if name not in own)]
