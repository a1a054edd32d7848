"""The message that starts the broker of a shared server."""

from typing import NamedTuple, Optional


class ServeBrokerRequest(NamedTuple):
    """Serve until the process ends. `settings` is the path of the settings, "" for the usual."""

    settings: Optional[str] = ""
