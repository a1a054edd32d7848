"""Messages about data sets that are already on the server."""

from typing import Dict, NamedTuple

from .verbs import Empty, Verb


class CheckDataRequest(NamedTuple):
    """Check that each of `directories` (name -> full path) is on the server and may be mounted."""

    directories: Dict[str, str]


CHECK_DATA = Verb("check-data", CheckDataRequest, Empty)
