"""Messages about a lab's store."""

from typing import NamedTuple, Tuple

from .runs import RunRecord
from .verbs import Verb


class RestoreRunRequest(NamedTuple):
    """Restore a run from the lab's store. `store` is the URL that the caller expects, or ""."""

    lab: str
    lab_id: str
    run: str
    store: str = ""


class RestoreRunReply(NamedTuple):
    """How many files and bytes arrived. `left_out` has the name of each file or checkpoint that
    the store lacks or that does not match its index, and why."""

    run: RunRecord
    files: int = 0
    bytes: int = 0
    left_out: Tuple[Tuple[str, str], ...] = ()


RESTORE_RUN = Verb("restore-run", RestoreRunRequest, RestoreRunReply)
