"""Messages about a lab's store: its settings, passes of the mirror, restores, and its content.

Sizes are in bytes, `sha256` is in hexadecimal. agent/mirror/store_index.py describes the layout of
a store. A document of a run (its specification, its record) passes through as it was written.
"""

from typing import Dict, NamedTuple, Optional, Tuple

from .codec import as_array
from .runs import AttemptRecord, RunRecord, RunSpec
from .verbs import Empty, LabRequest, Verb


@as_array
class StoredFile(NamedTuple):
    """A file that a store or a client has. Of one that only grows, the first `size` bytes."""

    size: int
    sha256: str


class PrepareStoreRequest(NamedTuple):
    """The store's settings, `url` "" for no store; the last five are those of an SSH server.

    `host_key` is the one to pin, `directory` the lab's own directory there.
    """

    lab: str
    lab_id: str
    url: str
    mirror_s: float = 0.0
    host: str = ""
    port: int = 0
    user: str = ""
    directory: str = ""
    host_key: str = ""


class PrepareStoreReply(NamedTuple):
    """`lacks` is what the server lacks to use the store, "" if nothing.

    `public_key` is that of a key pair that never leaves the server, for a store on an SSH server.
    """

    public_key: str
    lacks: str


class StoreConfigRecord(NamedTuple):
    """`store.json` of a lab on its server; see `PrepareStoreRequest`."""

    url: str = ""
    mirror_s: float = 0.0
    host: str = ""
    port: int = 0
    user: str = ""
    directory: str = ""


class MirrorPassRequest(NamedTuple):
    """One pass over `run`, or over all runs for ""; `all` includes new files and edited code."""

    lab: str
    lab_id: str
    run: str = ""
    all: bool = False


class MirrorPassReply(NamedTuple):
    """How many files and bytes were sent, and `behind_bytes`, which were due and not sent.

    `failed` are names, each with the reason. `why` the store cannot be used now, "" if it can.
    `bytes_s` is the speed in bytes a second, 0.0 if nothing was sent.
    """

    sent: int
    bytes: int
    behind_bytes: int
    failed: Tuple[Tuple[str, str], ...]
    why: str
    bytes_s: float


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


class StoredCode(NamedTuple):
    """The archive of a run's code."""

    size: int
    sha256: str


class StoredRunRecord(NamedTuple):
    """`run.json` of a run in a store, as it is read; see `RunObjectRecord`."""

    spec: RunSpec
    code: StoredCode
    record: Optional[RunRecord] = None
    attempts: Tuple[AttemptRecord, ...] = ()
    at: float = 0.0


class RunObjectRecord(NamedTuple):
    """`run.json` of a run in a store, as the mirror writes it.

    Its documents pass through unchanged. `at` is the Unix time, 0.0 in the copy on the server.
    """

    spec: object
    code: StoredCode
    record: object
    attempts: Tuple[object, ...]
    at: float = 0.0


class IndexRecord(NamedTuple):
    """`index.json` of a run in a store: its files by path, and when it was written (Unix time).

    `pending` are files that were about to replace others of the same name.
    """

    files: Dict[str, StoredFile] = {}
    pending: Dict[str, StoredFile] = {}
    at: float = 0.0


class SentRecord(NamedTuple):
    """`sent.json` of a run on its server: what the store at `url` has of it.

    `index` has the files that the store's index names. `about` is the last run.json, and `final`
    the run's record when everything had arrived.
    """

    url: str = ""
    files: Optional[Dict[str, StoredFile]] = None
    index: Optional[Dict[str, StoredFile]] = None  # type: ignore[assignment]  # tuple.index
    code: Optional[StoredCode] = None
    about: Optional[RunObjectRecord] = None
    final: object = None


class PutFileRequest(NamedTuple):
    """A file for a store on an SSH server (agent/mirror/ssh_gateway.py); `length` bytes follow.

    Without them, the complete draft SHA256.SIZE is put in place. With `expected`, a file is only
    replaced if its content has this hash ("" if it must not exist). Earlier gateways ignore
    `expected` and need `offset`.
    """

    key: str
    size: int
    sha256: str
    length: int
    offset: int = 0
    expected: Optional[str] = None
    do: str = "put"


class GetPartRequest(NamedTuple):
    key: str
    offset: int
    length: int
    do: str = "get"


class GatewayReply(NamedTuple):
    """The reply of the gateway to any request; `error` and `why` are set if it failed.

    The errors are "name", "full", "bad" (the hash differs), "missing" and "io". `rsync`, whether
    the gateway accepts drafts by rsync, is None in earlier versions. `length` counts the bytes that
    follow the reply to a get.
    """

    done: bool = False
    rsync: Optional[bool] = None
    length: int = 0
    error: str = ""
    why: str = ""


PREPARE_STORE = Verb("store", PrepareStoreRequest, PrepareStoreReply)
INSTALL_BOTO3 = Verb("store-boto3", Empty, Empty)
PROBE_STORE = Verb("store-probe", LabRequest, Empty)
MIRROR_NOW = Verb("mirror-now", MirrorPassRequest, MirrorPassReply)
RESTORE_RUN = Verb("restore-run", RestoreRunRequest, RestoreRunReply)
