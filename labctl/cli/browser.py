"""Open a page in the browser of this machine."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from labctl.cli.exit_codes import clean
from labctl.cli.wrapping import print_message


def open_in_browser(address: str) -> None:
    """Open the address, or say that this machine has no browser for it."""
    if not webbrowser.open(address):
        print_message(f"no browser was found on this machine; open it yourself: {clean(address)}")


def relative_path(file: Path) -> str:
    """Return the path relative to the current directory, or the whole path if it is outside."""
    here = Path.cwd()
    return str(file.relative_to(here) if file.is_relative_to(here) else file)
