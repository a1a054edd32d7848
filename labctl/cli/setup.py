"""The commands init and up."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from labctl.cli.completion_values import complete_providers, complete_templates
from labctl.cli.exit_codes import clean
from labctl.cli.options import (
    TIMINGS,
    find_timeline,
    has_blocker,
    json_option,
    list_timings,
    need_options,
    open_lab,
    print_timings_of_failure,
    stop_drawing,
    yes_option,
)
from labctl.cli.screen import Screen
from labctl.cli.tables import print_json, print_table
from labctl.cli.wrapping import print_message, wrap_lines
from labctl.config import DEFAULT_PROVIDER, LAB_FILE, find_data_dir, find_lab, load_lab
from labctl.config.reader import find_nearest
from labctl.errors import UsageError
from labctl.events import Note
from labctl.lazy import lazy_imports
from labctl.lifecycle.project_templates import DEFAULT_TEMPLATE, PROJECT_TEMPLATES
from labctl.providers import describe_provider, list_provider_names
from labctl.servers.provider_traits import get_settings_example
from labctl.shell import command as words
from labctl.text import price_or_free_text

if TYPE_CHECKING:
    from labctl.config import LabConfig
    from labctl.lab import Lab
    from labctl.lifecycle.project_scan import ProjectFacts
    from labctl.model import Server

with lazy_imports(__name__):
    from labctl.lifecycle import lab_draft, sample_project
    from labctl.servers import adoption
    from labctl.services import lab_services, model_serving


def _parse_directory(
    ctx: click.Context, parameter: click.Parameter, value: str | None
) -> Path | None:
    if value == "":
        raise UsageError(
            "DIRECTORY is empty",
            why="perhaps a shell variable has no value",
            hint="labctl init digits   # a sample\n"
            "labctl init   # in a directory with your own code",
        )
    return None if value is None else Path(value)


@click.command("init")
@click.argument("directory", required=False, type=click.Path(), callback=_parse_directory)
@click.option(
    "--provider",
    shell_complete=complete_providers,
    help="Get servers from this provider: local, static, aws, ...",
)
@click.option(
    "--template",
    metavar="NAME",
    shell_complete=complete_templates,
    help="Create this sample project; --templates lists them.",
)
@click.option("--templates", is_flag=True, help="List the sample projects, and what each teaches.")
@click.pass_context
def init_command(
    ctx: click.Context,
    directory: Path | None,
    provider: str | None,
    template: str | None,
    templates: bool,
) -> None:
    """Make a lab of the code in DIRECTORY (default: here), or create a sample project there.

    In a directory with code, labctl looks at its files, its lists of packages and its imports, and
    writes a lab.yaml with a comment on each guess. In a new directory, it creates a sample project
    that trains an image classifier, or the one that --template names.

    \b
    cd my-project && labctl init
    labctl init digits && cd digits && labctl up
    labctl init writer --template text-generator
    """
    if templates:
        print_table(list(PROJECT_TEMPLATES.items()), ("TEMPLATE", "TEACHES"), cut=False)
        return
    target = Path(ctx.find_root().obj or ".") / (directory or ".")
    if template is not None:
        _require_template(ctx, template)
    elif directory is None or (target.is_dir() and any(target.iterdir())):
        facts = _adopt(ctx, target, provider)
        click.echo(f"{_format_cd(target)}  labctl up")
        if facts.program.command:
            click.echo("  labctl run")
        elif facts.has_notebooks:
            click.echo("  labctl forward jupyter")
        else:
            click.echo("\nNo program was found. Add yours as run: in lab.yaml.")
        return
    # before a question whose answer would be lost
    sample_project.check_new_directory(target, provider or "", template or "")
    _require_provider(ctx, provider)
    _warn_inside_lab(target)
    provider = _choose_provider(ctx, provider)
    screen = Screen()
    ctx.call_on_close(screen.stop_drawing)
    example = _find_example(load_lab(target / LAB_FILE, needs_file=False), provider)
    sample_project.create_project(
        find_data_dir() / "templates",
        target,
        provider,
        screen,
        example,
        template or DEFAULT_TEMPLATE,
    )
    name = target.resolve().name
    action = f"Write server.{provider} in its lab.yaml, then" if example else "Next"
    click.echo(f"{name} is ready. {action}:\n\n{_format_cd(target)}  labctl up\n  labctl run")


def _require_template(ctx: click.Context, template: str) -> None:
    """Raise UsageError, with the nearest name, if there is no such template."""
    if template in PROJECT_TEMPLATES:
        return
    near = find_nearest(template, PROJECT_TEMPLATES)
    raise UsageError(
        f"there is no template {template!r}" + (f"; did you mean {near}?" if near else ""),
        why=f"the templates are {', '.join(PROJECT_TEMPLATES)}",
        hint=f"{_format_init(ctx, template=near or DEFAULT_TEMPLATE)}\nlabctl init --templates",
    )


def _format_init(ctx: click.Context, **options: str) -> str:
    """Return the command as it was typed, with these options instead of the typed ones."""
    place, directory = ctx.find_root().obj, ctx.params["directory"]
    words = ["labctl", *([] if place in (None, ".") else ["-C", str(place)]), "init"]
    words += [str(directory)] if directory else []
    for name in ("template", "provider"):
        if value := options.get(name) or ctx.params[name]:
            words += [f"--{name}", value]
    return shlex.join(words)


def _format_cd(target: Path) -> str:
    """Return the line that enters the new lab, "" if the shell is there already."""
    is_there = target.resolve() == Path.cwd()
    return "" if is_there else f"  cd {shlex.quote(str(target))}\n"


def _adopt(ctx: click.Context, target: Path, provider: str | None) -> ProjectFacts:
    """Write a lab.yaml for the code in `target`, print what it sets, and return what was found."""
    facts = lab_draft.scan_candidate(target)
    _require_provider(ctx, provider)
    _warn_inside_lab(target)
    own = load_lab(target, overrides={"name": "new"}, needs_file=False)
    if provider is None and "server.provider" in own.origins:
        chosen = ""  # config.yaml or the environment says it
    else:
        chosen = _choose_provider(ctx, provider)
    used = chosen or own.server.provider
    example = _find_example(own, used)
    files = lab_draft.adopt_project(target, facts, chosen, own.base_image, example)
    click.echo(f"{' and '.join(clean(str(file)) for file in files)} written. The settings:\n")
    for line in files[-1].read_text(encoding="utf-8").splitlines():
        if line and not line.lstrip().startswith("#"):
            click.echo(f"  {clean(line)}")
    section = f" and write server.{used}" if example else ""
    click.echo(f"\nThe file explains each guess. Check it{section}, then:\n")
    return facts


def _find_example(own: LabConfig, provider: str) -> str:
    """Return the section of lab.yaml that the provider requires, unless config.yaml has it."""
    is_set = any(key.startswith(f"server.{provider}.") for key in own.origins)
    return "" if is_set else get_settings_example(provider)


def _warn_inside_lab(target: Path) -> None:
    """Warn if the new lab will be inside another."""
    existing = next(path for path in (target, *target.absolute().parents) if path.is_dir())
    outer = find_lab(existing)
    if outer != target and (outer / LAB_FILE).exists():
        text = f"{target.absolute()} is inside the lab {outer.absolute()}. "
        text += "Commands that you type there will use the new lab."
        Screen().emit(Note(text=text, level="warning"))


def _choose_provider(ctx: click.Context, provider: str | None) -> str:
    """Return the provider; ask for it on a terminal. UsageError for an unknown one."""
    names = list_provider_names()
    if provider is None and sys.stdin.isatty():
        print_message("Where should labctl get servers?")
        for name in names:
            lines = wrap_lines(describe_provider(name), 10, has_commands=False)
            click.echo(f"  {name:<8}" + "\n          ".join(lines), err=True)
        provider = _ask_for_provider(names)
    provider = provider or DEFAULT_PROVIDER
    _require_provider(ctx, provider)
    return provider


def _require_provider(ctx: click.Context, provider: str | None) -> None:
    """UsageError, with the nearest name, if a provider was typed and is unknown."""
    names = list_provider_names()
    if provider and provider not in names:
        near = find_nearest(provider, names)
        raise UsageError(
            f"there is no provider {provider!r}" + (f"; did you mean {near}?" if near else ""),
            why=f"the providers are {', '.join(names)}",
            hint=_format_init(ctx, provider=near or DEFAULT_PROVIDER),
        )


def _ask_for_provider(names: Sequence[str]) -> str:
    """Ask until the answer is the name of a provider, or Enter for the default."""
    while True:
        name = str(click.prompt("provider", default=DEFAULT_PROVIDER, err=True)).strip()
        if name in names:
            return name
        near = find_nearest(name, names)
        question = f"; did you mean {near}?" if near else ""
        print_message(f"there is no provider {name!r}{question}")


@click.command("up")
@need_options
@click.option("--budget", help="End the server when the lab has cost this many dollars in total.")
@click.option("--ttl", help="End the server after this long, for example 8h.")
@click.option("--idle", help="End the server after this long without work, for example 30m.")
@click.option(
    "--no-deadline",
    is_flag=True,
    help="Do not end a server that costs money after the default 12 hours.",
)
@TIMINGS
@yes_option
@json_option
@click.pass_context
def up_command(
    ctx: click.Context,
    /,
    yes: bool,
    json_: bool,
    no_deadline: bool,
    timings: bool,
    **overrides: str,
) -> None:
    """Start the lab's server, or use the one that it already has.

    labctl ends a server that costs money after 12 hours. To replace this limit, use --ttl,
    --budget or --no-deadline, or set ttl, max_ttl or budget in lab.yaml. On AWS, the end
    terminates the instance.

    \b
    labctl up
    labctl up --gpu T4 --max-price 0.60
    """
    lab = open_lab(ctx, yes=yes, quiet=json_, overrides=overrides, timings=timings)
    need = lab.config.server.need
    need_without_deadline = msgspec.structs.replace(need, deadline=False) if no_deadline else None
    with print_timings_of_failure(ctx, quiet=json_):
        server = lab.up(need_without_deadline).server
    stop_drawing(ctx)
    if json_:
        print_json({"server": server, **list_timings(ctx)})
        return
    if timeline := find_timeline(ctx):
        timeline.print_once()
    print_ready(lab, server, can_run=not has_blocker(ctx))


def _suggest_reopening(services: Sequence[str]) -> list[str]:
    """Return the commands that open background forwards of these services."""
    others = [name for name in services if name != model_serving.NAME]
    lines = [words("labctl", "forward", *others, "--detach").render()] if others else []
    return [*lines, "labctl serve --detach"] if model_serving.NAME in services else lines


def print_ready(lab: Lab, server: Server, *, can_run: bool = True) -> None:
    """Print that the server is ready, its price, and what to do next."""
    count = lab.config.server.count
    cost = price_or_free_text(server.offer.price_usd_per_hour * count)
    verb, names = (
        ("is", server.alias) if count == 1 else ("are", f"{count} servers of {server.lab}")
    )
    state = f"{verb} ready" if can_run else f"{verb} running, but no run can start yet"
    click.echo(f"{names} {state} ({server.provider}, {cost}).")
    rows = [("labctl run", "start the training")]
    if not lab.config.run:
        rows = [
            ("labctl run -- COMMAND", "run a command"),
            ("labctl forward jupyter", "open JupyterLab"),
        ]
    if not can_run:
        rows = [("labctl up", "check again, after you have fixed the above")]
    rows.append((f"ssh {server.alias}", "open a shell on the server"))
    if count > 1:
        rows[-1] = (f"ssh {server.alias}", "open a shell on the first server")
        rows.append(("labctl ssh --server 1", "open a shell on the second"))
    if closed := lab_services.list_closed_forwards(lab.context, server):
        effect = "reopen what labctl stop closed"
        rows += [(line, effect) for line in _suggest_reopening(closed)]
    end = adoption.describe_down(lab.context)
    rows.append(("labctl down", f"{end} when you are done"))
    width = max(16, *(len(command) for command, _ in rows))
    for command, text in rows:
        click.echo(f"  {command:<{width}}  {text}")
