"""The commands init, up and doctor."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from labctl.cli.options import (
    PROVIDER,
    TIMINGS,
    find_timeline,
    json_option,
    list_timings,
    need_options,
    open_lab,
    yes_option,
)
from labctl.cli.screen import Screen, print_checks, print_json
from labctl.config import find_data_dir
from labctl.errors import UsageError
from labctl.providers import list_provider_names
from labctl.text import price_text

PROVIDERS = {
    "local": "a container on this machine (needs Docker; no GPU)",
    "static": "existing machines that you reach with ssh",
    "aws": "the cheapest fitting instance at AWS; costs money",
    "course": "the server that your course gives you; use labctl join FILE instead",
}


@click.command("init")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--provider", help="Get servers from this provider: local, static, aws, ...")
@click.pass_context
def init_command(ctx: click.Context, directory: Path, provider: str | None) -> None:
    """Create a sample project in DIRECTORY that trains an image classifier.

    \b
    labctl init digits && cd digits && labctl up
    """
    from labctl.lifecycle.sample_project import create_project

    names = list_provider_names()
    if provider is None and sys.stdin.isatty():
        click.echo("Where should labctl get servers?", err=True)
        for name in names:
            click.echo(f"  {name:<8}{PROVIDERS.get(name, 'from a plugin package')}", err=True)
        provider = click.prompt("provider", default="local", type=click.Choice(names), err=True)
    provider = provider or "local"
    if provider not in names:
        raise UsageError(
            f"there is no provider {provider!r}",
            why=f"the providers are {', '.join(names)}",
            hint="labctl init digits --provider local",
        )
    target = Path(ctx.find_root().obj or ".") / directory
    create_project(find_data_dir() / "templates", target, provider, Screen())
    click.echo(f"{directory} is ready. Next:\n\n  cd {directory}\n  labctl up\n  labctl run")


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
    server = lab.up(need_without_deadline).server
    if json_:
        print_json({"server": server, **list_timings(ctx)})
        return
    if timeline := find_timeline(ctx):
        timeline.print_once()
    price = server.offer.price_usd_per_hour
    cost = price_text(price) if price else "costs nothing"
    click.echo(f"{server.alias} is ready ({server.provider}, {cost}).")
    click.echo("  labctl run        start the training")
    click.echo(f"  ssh {server.alias:<14}open a shell on the server")
    click.echo("  labctl down       remove the server when you are done")


@click.command("doctor")
@PROVIDER
@json_option
@click.pass_context
def doctor_command(ctx: click.Context, provider: str | None, json_: bool) -> None:
    """Check this machine, the provider and the server. Exits with 1 if a check fails.

    \b
    labctl doctor
    """
    from labctl.lifecycle.doctor import run_doctor

    overrides = {"provider": provider} if provider else {}
    checks = run_doctor(open_lab(ctx, quiet=json_, overrides=overrides).context)
    if json_:
        print_json({"checks": checks})
    else:
        print_checks(checks)
    ctx.exit(0 if all(check.ok for check in checks) else 1)
