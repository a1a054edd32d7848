"""Forwards that stay open until Ctrl-C."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from labctl.cli.exit_codes import INTERRUPTED, leave_interrupted_line
from labctl.cli.options import stop_drawing
from labctl.cli.wrapping import print_message

if TYPE_CHECKING:
    from labctl.services.port_forward import Forwarding


@contextmanager
def close_at_interrupt(ctx: click.Context, text: str = "closed") -> Iterator[None]:
    """Let Ctrl-C inside the block, while services start, end the command with `text`."""
    try:
        yield
    except KeyboardInterrupt:
        stop_drawing(ctx)
        leave_interrupted_line()
        print_message(text)
        ctx.exit(INTERRUPTED)


def wait_until_interrupted(forwards: Iterable[Forwarding], invitation: str = "") -> None:
    """Print how to close the forwards and keep them open until Ctrl-C; the caller closes them."""
    try:
        if invitation:
            print_message(invitation)  # here, since Ctrl-C may follow at once
        for forward in forwards:
            forward.wait()
    except KeyboardInterrupt:
        leave_interrupted_line()
        print_message("closed")
