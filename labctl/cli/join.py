"""join: a student's way into a course."""

from __future__ import annotations

from pathlib import Path

import click

from labctl.cli.options import json_option, yes_option


@click.command("join")
@click.argument("place", metavar="FILE-OR-URL")
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    help="The lab's directory; default: the course's name.",
)
@click.option(
    "--key", default="", metavar="ed25519:...", help="The course's key, where you know it."
)
@yes_option
@json_option
@click.pass_context
def join_command(
    ctx: click.Context, place: str, into: Path | None, key: str, yes: bool, json_: bool
) -> None:
    """Join a course with the file, or the https:// address, that your instructor sends you.

    It works once. Your key is made on this machine and does not leave it; the keeper gets its
    public half. Then labctl up, run, submit and the rest work within the course's budget.

    \b
    labctl join ml-2026-alice.join
    cd ml-2026 && labctl up
    """
    from labctl.cli.exit_codes import clean
    from labctl.cli.options import SCREEN
    from labctl.cli.screen import Screen, as_json
    from labctl.config import paths
    from labctl.courses.join import encoded, fetch, join

    screen = Screen(yes=yes, quiet=json_)
    ctx.meta[SCREEN] = screen
    ctx.call_on_close(screen.rest)
    data = fetch(place)
    base = Path(ctx.find_root().obj or ".")
    target = base / into if into is not None else None
    joined = join(data, target, paths(), screen, key=key, base=base)
    if json_:
        as_json({"joined": encoded(joined)})
        return
    again = "were in already" if joined.again else "are in"
    click.echo(f"you {again}: {joined.course}, as {joined.student}")
    if joined.section:
        click.echo(f"{joined.directory / 'lab.yaml'} stays as it is; for servers write into it:\n")
        click.echo(clean(joined.section))
    for name in joined.assignments:
        click.echo(f"  assignments/{name}.yaml")
    shown = clean(str(joined.directory))
    click.echo(f"\n  cd {shown}\n  labctl up         a server of the course's\n  labctl run")
    if joined.assignments:
        first = joined.assignments[0]
        click.echo(f"  labctl submit --assignment assignments/{first}.yaml")
