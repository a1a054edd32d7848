"""Messages between a laptop and the keeper of its labs: `labctl keep` on another machine, over ssh.

The verb is a hidden option and the request its arguments: `labctl keep --give LAB RUN`. A lab is
named by its name and id, as in digits-0f1e2d3c4b5a. The reply is one line of JSON; a failure is
{"error": {kind, what, why, hint}}. The keeper also calls itself so, to recover runs (--attend).
"""

from typing import Dict, NamedTuple, Optional, Tuple

from .codec import with_keys
from .mirrors import StoredFile
from .verbs import Empty, Verb


class KeptLabRequest(NamedTuple):
    lab: str


class KeeperInfo(NamedTuple):
    """The keeper's machine. `have` are the files of the lab that it has: path -> sha256."""

    version: str
    host: str
    running: bool
    have: Dict[str, str] = {}


class GreetLabKeeperReply(NamedTuple):
    known: KeeperInfo
    version: int = 1


class ImportedLab(NamedTuple):
    """A lab that this keeper now keeps, and whether `labctl keep` is running there."""

    name: str
    runs: Tuple[str, ...]
    running: bool


class ImportLabReply(NamedTuple):
    taken: ImportedLab
    version: int = 1


class LedgerLineRecord(NamedTuple):
    """A line of the keeper's ledger; see `labctl.state.ledgers`."""

    ledger: str
    number: int
    at: float
    kind: str
    server_id: str = ""
    run_id: str = ""
    detail: Dict[str, object] = {}


@with_keys(summary="told")
class KeptRunRecord(NamedTuple):
    """A run as the keeper last saw it; see `labctl.model.Run`."""

    id: str
    lab_id: str
    server_id: str
    state: str
    command: Tuple[str, ...] = ()
    image: str = ""
    exit_code: Optional[int] = None
    summary: str = ""
    created_at: float = 0.0
    started_at: Optional[float] = None
    ended_at: Optional[float] = None
    container: str = ""
    progress: Dict[str, float] = {}
    new_files: Tuple[str, ...] = ()
    seen_at: float = 0.0
    stopped_by: str = ""
    image_id: str = ""
    image_digest: str = ""
    gpu_lost_at: Optional[float] = None
    oom_limit_bytes: Optional[int] = None
    executor: Optional[str] = None
    has_checkpoints: Optional[bool] = None


class KeeperCheckRecord(NamedTuple):
    """The last check of the lab, at Unix second `at`. `error` is "" if it passed."""

    at: float
    state: str
    error: str = ""
    hint: str = ""
    next_at: float = 0.0


class MemberReportRecord(NamedTuple):
    """What the keeper knows of one of the lab's other servers, by the server's own lab id."""

    lab_id: str
    lines: Tuple[LedgerLineRecord, ...] = ()
    runs: Tuple[KeptRunRecord, ...] = ()


class KeeperReportRecord(NamedTuple):
    """What the keeper knows of the lab; `round` is None before the first check.

    `members` are the servers beside the first one.
    """

    lines: Tuple[LedgerLineRecord, ...] = ()
    runs: Tuple[KeptRunRecord, ...] = ()
    round: Optional[KeeperCheckRecord] = None
    running: bool = False
    members: Tuple[MemberReportRecord, ...] = ()


@with_keys(report="told")
class DescribeKeptLabReply(NamedTuple):
    report: KeeperReportRecord
    version: int = 1


class SendRunRequest(NamedTuple):
    """Send the files of a run. A line of JSON follows: those that the laptop has, path -> sha256.

    After the reply comes a tar archive of the others.
    """

    lab: str
    run: str


class SendRunReply(NamedTuple):
    """All files of the run, by their paths below it."""

    files: Dict[str, StoredFile]
    version: int = 1


class NoteCancelRequest(NamedTuple):
    """The user cancels the run: it must not start again."""

    lab: str
    run: str


class NoteCancelReply(NamedTuple):
    version: int = 1


class DropKeptLabReply(NamedTuple):
    """The name of the lab that is no longer kept."""

    dropped: str
    version: int = 1


class RecoverRunsReply(NamedTuple):
    version: int = 1


GREET_LAB_KEEPER = Verb("hello", KeptLabRequest, GreetLabKeeperReply)
# The exported lab follows on standard input.
IMPORT_LAB = Verb("add", Empty, ImportLabReply)
DESCRIBE_KEPT_LAB = Verb("told", KeptLabRequest, DescribeKeptLabReply)
SEND_RUN = Verb("give", SendRunRequest, SendRunReply)
NOTE_CANCEL = Verb("cancel", NoteCancelRequest, NoteCancelReply)
DROP_KEPT_LAB = Verb("drop", KeptLabRequest, DropKeptLabReply)
RECOVER_RUNS = Verb("attend", KeptLabRequest, RecoverRunsReply)
