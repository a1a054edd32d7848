"""Open a page in the browser of this machine."""

from __future__ import annotations

import webbrowser

from labctl.cli.exit_codes import clean
from labctl.cli.wrapping import print_message


def open_in_browser(address: str) -> None:
    """Open the address, or say that this machine has no browser for it."""
    if not webbrowser.open(address):
        print_message(f"no browser was found on this machine; open it yourself: {clean(address)}")
