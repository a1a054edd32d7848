"""Messages about a lab's store."""

from typing import NamedTuple, Tuple

from .runs import RunRecord
from .verbs import Verb


class RestoreRunRequest(NamedTuple):
    """Restore a run from the store at the address `store`, "" for the one that the server has."""

    lab: str
    lab_id: str
    run: str
    store: str = ""


class RestoreRunReply(NamedTuple):
    """The run as `status` shows it, and how many files and bytes arrived.

    `left_out` are files that the store lacks or that do not match its index, each with the reason.
    """

    run: RunRecord
    files: int
    bytes: int
    left_out: Tuple[Tuple[str, str], ...]


RESTORE_RUN = Verb("restore-run", RestoreRunRequest, RestoreRunReply)
