"""The results of checks, as `doctor` and `course check` print them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from labctl.cli.exit_codes import clean, format_next
from labctl.cli.tables import wrap_text

if TYPE_CHECKING:
    from labctl.model import Check


def print_checks(checks: Sequence[Check], width: int = 0) -> None:
    """Print the results of `doctor` or `course check`.

    On a terminal the text is wrapped. Commands are not, because people copy them.
    """
    for check in checks:
        mark = click.style("ok", fg="green") if check.ok else click.style("!!", fg="red")
        if check.skipped:
            mark = click.style("--", fg="yellow")
        if check.ok and check.warning:
            mark = click.style("! ", fg="yellow")
        text = "\n    ".join(wrap_text(clean(f"{check.name}: {check.detail}"), 4, width))
        click.echo(f"{mark}  {text}")
        for number, line in enumerate(format_next(check.next)):
            click.echo(f"      {'' if number else 'next:':<5} {line}")
