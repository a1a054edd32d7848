"""course check, bake: before the class."""

from __future__ import annotations

from pathlib import Path

import click

from labctl.cli.course import open_course
from labctl.cli.course_keeper import AUTHORIZED_KEYS
from labctl.cli.course_options import chosen, only_options, staff_of
from labctl.cli.options import json_option, rest, yes_option


@click.command("check")
@only_options
@click.option("--boot", is_flag=True, help="Make one server, measure its boot, end it. It costs.")
@AUTHORIZED_KEYS
@yes_option
@json_option
@click.pass_context
def check_command(
    ctx: click.Context,
    only: str,
    group: str,
    boot: bool,
    keys_file: Path,
    yes: bool,
    json_: bool,
) -> None:
    """Class-day check: quota and price for everybody, the keeper, keys, logins, sshd, disks, the
    image.

    Each failure names the next step. Exits with 1 if something is amiss; `--` marks what could not
    be checked.

    \b
    labctl course check
    labctl course check --boot
    """
    from labctl.cli.screen import as_json, draw_checks
    from labctl.courses.preflight import check

    course = open_course(ctx, yes=yes, quiet=json_)
    seats = chosen(course, only, group)
    checks = check(staff_of(course), seats, boot=boot, keys_file=keys_file)
    rest(ctx)
    if json_:
        as_json({"checks": checks})
    else:
        draw_checks(checks)
    ctx.exit(0 if all(one.ok for one in checks) else 1)


@click.command("bake")
@click.option("--drop", is_flag=True, help="Remove the baked image; servers boot as before.")
@yes_option
@json_option
@click.pass_context
def bake_command(ctx: click.Context, drop: bool, yes: bool, json_: bool) -> None:
    """Make a machine image with the course's Docker image and data inside; seats boot from it.

    One server is made, prepared, cleaned of keys and ended. The image costs by the month until
    --drop or the end of the term.

    \b
    labctl course bake
    labctl course bake --drop
    """
    from labctl.cli.screen import as_json
    from labctl.courses.bake import bake
    from labctl.courses.bake import drop as take_away

    course = open_course(ctx, yes=yes, quiet=json_)
    if drop:
        gone = take_away(staff_of(course))
        if json_:
            as_json({"removed": gone})
        else:
            click.echo(f"{len(gone)} things removed; servers boot from the provider's own image")
        return
    found = bake(staff_of(course))
    if json_:
        as_json({"baked": found})
        return
    click.echo(f"{found.image_id} is ready; labctl course up boots from it")
    if found.usd_per_month:
        click.echo(
            f"  it costs {found.usd_per_month:.2f} dollars a month; labctl course bake --drop"
        )
