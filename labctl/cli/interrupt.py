"""Forwards that stay open until Ctrl-C."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from labctl.cli.exit_codes import end_interrupted_line
from labctl.cli.wrapping import print_message

if TYPE_CHECKING:
    from labctl.services.port_forward import Forwarding


def wait_until_interrupted(forwards: Iterable[Forwarding], invitation: str = "") -> None:
    """Print how to close the forwards and keep them open until Ctrl-C; the caller closes them."""
    try:
        if invitation:
            print_message(invitation)  # here, since Ctrl-C may follow at once
        for forward in forwards:
            forward.wait()
    except KeyboardInterrupt:
        end_interrupted_line()
        print_message("closed")
