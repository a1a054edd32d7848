"""The commands course check and course bake, for the time before a class."""

from __future__ import annotations

from pathlib import Path

import click

from labctl.cli.checks import print_checks
from labctl.cli.course import open_course
from labctl.cli.course_options import make_staff, only_options, select_seats
from labctl.cli.options import AUTHORIZED_KEYS, json_option, stop_drawing, yes_option
from labctl.cli.tables import print_json
from labctl.lazy import lazy_imports
from labctl.text import dollars_text

with lazy_imports(__name__):
    from labctl.courses import bake, preflight


@click.command("check")
@only_options
@click.option(
    "--boot",
    is_flag=True,
    help="Start one server, measure its boot, and remove it. This costs money.",
)
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
    """Check quotas, prices, keeper, keys, logins, sshd, disks and the image before a class.

    Each failure names the next step. `--` marks a check that could not run. Exits with 1 if a check
    fails.

    \b
    labctl course check
    labctl course check --boot
    """
    course = open_course(ctx, yes=yes, quiet=json_)
    seats = select_seats(course, only, group)
    checks = preflight.check_course(make_staff(course), seats, boot=boot, keys_file=keys_file)
    stop_drawing(ctx)
    if json_:
        print_json({"checks": checks})
    else:
        print_checks(checks)
    ctx.exit(0 if all(check.ok for check in checks) else 1)


@click.command("bake")
@click.option("--drop", is_flag=True, help="Remove the baked image; servers boot as before.")
@yes_option
@json_option
@click.pass_context
def bake_command(ctx: click.Context, drop: bool, yes: bool, json_: bool) -> None:
    """Build a machine image with the course's Docker image and data; servers boot from it.

    labctl starts one server, prepares it, removes its keys, and terminates it. The image costs
    money every month until labctl course bake --drop or labctl course down --end-of-term removes
    it.

    \b
    labctl course bake
    labctl course bake --drop
    """
    course = open_course(ctx, yes=yes, quiet=json_)
    if drop:
        removed = bake.drop_images(make_staff(course))
        if json_:
            print_json({"removed": removed})
        else:
            click.echo(
                f"Removed {len(removed)} images and snapshots; "
                "servers boot from the provider's own image."
            )
        return
    image = bake.bake(make_staff(course))
    if json_:
        print_json({"baked": image})
        return
    click.echo(f"{image.image_id} is ready; labctl course up boots from it")
    if image.usd_per_month:
        click.echo(
            f"  it costs {dollars_text(image.usd_per_month)} a month; "
            "to remove it: labctl course bake --drop"
        )
