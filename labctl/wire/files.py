"""Messages about files: a push, a download, fetched data sets, and results from another disk.

`sha256` is in hexadecimal, sizes are in bytes. Paths are relative, with "/".
"""

from typing import Dict, NamedTuple, Optional, Tuple

from .codec import as_array
from .verbs import Empty, LabRequest, StreamingVerb, Verb

# The directory of a lab on a server with what the course's assignments wrote into its code: below
# the name of each assignment, its files as they were handed out.
DELIVERED = ".labctl/starters"


@as_array
class PushedFile(NamedTuple):
    """A file of a push, as the client has it; `sha256` is "" if the client has not read it yet."""

    path: str
    size: int
    sha256: str
    mode: int
    mtime_ns: int


class PlanRequest(NamedTuple):
    """`target` is "code", "data/<name>" or another tree of agent/files/push_target.py.

    `contents` may hold small files, in base64: if no other files are needed, they are committed at
    once. `force` replaces what was edited on the server.
    """

    lab: str
    lab_id: str
    target: str
    files: Tuple[PushedFile, ...]
    force: bool = False
    contents: Optional[Dict[str, str]] = None


class PlanReply(NamedTuple):
    """What a push needs. All but the sizes and `staging`, `basis` and `rsync` are paths.

    `whole` are those of `needed` that are complete in the staging directory, and `staged_bytes`
    counts those and the parts of others. `unsure` are files without a sha256 whose size matches the
    file on the server: nothing is done until their hash is known. `conflicts` are files edited on
    the server since the last push. `removed` are files that the last push brought and that no
    longer exist on the client: if nothing is needed they are removed at once, otherwise by a
    commit. `basis` is the tree on the server, "" if there is no tree, and `rsync` the output of
    `rsync --version`. `bad` is that of `CommitReply`, None if the plan committed nothing.
    """

    needed: Tuple[str, ...]
    whole: Tuple[str, ...]
    staged_bytes: int
    unsure: Tuple[str, ...]
    conflicts: Tuple[str, ...]
    removed: Tuple[str, ...]
    short_bytes: int
    free_bytes: int
    staging: str
    basis: str = ""
    rsync: str = ""
    bad: Optional[Tuple[str, ...]] = None


class CommitRequest(NamedTuple):
    lab: str
    lab_id: str
    target: str
    files: Tuple[PushedFile, ...]
    removed: Tuple[str, ...]
    force: bool = False


class CommitReply(NamedTuple):
    """How many files are in place now, and the paths of others.

    `bad` did not arrive as announced, or have no sha256. `conflicts` were edited on the server
    since the plan, and stay as they are.
    """

    committed: int
    bad: Tuple[str, ...]
    conflicts: Tuple[str, ...]


@as_array
class EditedFile(NamedTuple):
    """A code file that was created or changed on the server.

    `base` is the hash of what the last push brought, "" for a new file.
    """

    path: str
    size: int
    sha256: str
    base: str


@as_array
class SkippedFile(NamedTuple):
    path: str
    reason: str


class EditsReply(NamedTuple):
    """Files edited on the server since the last push, and those that cannot be read.

    `root` is the directory of the code, `rsync` the output of `rsync --version`.
    """

    files: Tuple[EditedFile, ...]
    skipped: Tuple[SkippedFile, ...]
    root: str
    rsync: str


@as_array
class FilePart(NamedTuple):
    """The first `size` bytes of a file."""

    path: str
    size: int


@as_array
class HomeFile(NamedTuple):
    path: str
    size: int


class CodeFilesReply(NamedTuple):
    """All files of the lab's code below `root`, and those left out; `rsync` as in EditsReply."""

    files: Tuple[FilePart, ...]
    skipped: Tuple[SkippedFile, ...]
    root: str
    rsync: str


class HomeFilesRequest(NamedTuple):
    """List the files that appeared in the home directory since `since`, in Unix seconds."""

    since: float


class HomeFilesReply(NamedTuple):
    """Files outside labctl's directories, below `root`, and those that cannot be read.

    `rsync` is the output of `rsync --version`.
    """

    files: Tuple[HomeFile, ...]
    skipped: Tuple[SkippedFile, ...]
    root: str
    rsync: str


class PartsRequest(NamedTuple):
    """Parts of the files of a run; `run` "" means the lab's code, or with `home` the home."""

    lab: str
    lab_id: str
    run: str
    parts: Tuple[FilePart, ...] = ()
    home: bool = False


class HashesReply(NamedTuple):
    """The hash of each part, in their order.

    "" for a file that differs from what `manifest` listed, before or after it is read.
    """

    sha256: Tuple[str, ...]


class ManifestRequest(NamedTuple):
    """List the complete files of each run in `runs` (all if empty), below its outputs or `all`.

    `outputs` adds to the outputs that a run was started with, `only` replaces them. With `quick`,
    large files are not read: their hash is the one in a checkpoint's manifest, or "" (then verb
    `hashes` computes it). A wrong hash in a manifest is not detected.
    """

    lab: str
    lab_id: str
    runs: Tuple[str, ...] = ()
    all: bool = False
    outputs: Tuple[str, ...] = ()
    only: Tuple[str, ...] = ()
    quick: bool = False


@as_array
class CompleteFile(NamedTuple):
    """A file of a run. Of a `growing` one, the first `size` bytes count."""

    path: str
    size: int
    sha256: str
    growing: bool


class RunManifest(NamedTuple):
    """The files of a run in `directory`, its path on the server.

    `skipped` exist only on the server. `unpulled` counts the files that no client has reported to
    hold (verb `pulled`). `rsync` is the output of `rsync --version`, "" without `quick`.
    """

    files: Tuple[CompleteFile, ...]
    skipped: Tuple[SkippedFile, ...]
    directory: str
    ended: bool
    unpulled: int = 0
    rsync: str = ""


class ManifestReply(NamedTuple):
    runs: Dict[str, RunManifest]


@as_array
class PulledFile(NamedTuple):
    path: str
    size: int
    sha256: str


@as_array
class PulledEdit(NamedTuple):
    path: str
    sha256: str


class PulledRequest(NamedTuple):
    """What a client holds and has verified: files of runs, and edited files of the lab's code."""

    lab: str
    lab_id: str
    runs: Optional[Dict[str, Tuple[PulledFile, ...]]] = None
    edits: Tuple[PulledEdit, ...] = ()


class FetchRequest(NamedTuple):
    """Fetch each of `sources` (name -> address) to the lab's data directory.

    `s3_endpoint` is the address of another store than AWS's S3. Lines of progress follow the
    opening, each a JSON array: [name, bytes done, total or 0], or [name, text].
    """

    lab: str
    lab_id: str
    sources: Dict[str, str]
    s3_endpoint: str = ""


class FetchedSet(NamedTuple):
    """A data set on the server. `unchanged` means that nothing had to be fetched."""

    files: int
    bytes: int
    unchanged: bool


class FetchReply(NamedTuple):
    sets: Dict[str, FetchedSet]


class RestoreDiskRequest(NamedTuple):
    """Copy from the disk `device` what it holds of this lab and the server lacks.

    `uid`, `gid` and `home` are those of the lab's account, when the agent calls itself as root.
    """

    lab: str
    lab_id: str
    device: str
    uid: Optional[int] = None
    gid: Optional[int] = None
    home: str = ""


class RestoreDiskReply(NamedTuple):
    """The runs copied, how many files and bytes in total, and the edited files of the code."""

    runs: Tuple[str, ...]
    files: int
    bytes: int
    edits: Tuple[str, ...]


@as_array
class HashRecord(NamedTuple):
    """A run's file in its hashes.json: its hash, "" if not computed yet, while it is unchanged."""

    size: int
    mtime_ns: int
    sha256: str


@as_array
class PushedRecord(NamedTuple):
    """A file as a push brought it, by its path in `.pushed-*.json`."""

    sha256: str
    size: int
    mtime_ns: int


class DownloadRecord(NamedTuple):
    """A data set fetched over HTTPS, or a download that has begun; `files` is 0 until it is there.

    `etag` and `modified` are HTTP headers, "" where absent. `validator` is the one of them that
    allows to resume, "" for neither. `size` is that of the download, None if the server did not
    announce it.
    """

    address: str
    etag: str = ""
    modified: str = ""
    validator: str = ""
    size: Optional[int] = None
    files: int = 0


@as_array
class ObjectRecord(NamedTuple):
    etag: str
    size: int


class BucketRecord(NamedTuple):
    """A data set fetched from a bucket: its objects by their names in the data set."""

    address: str
    objects: Dict[str, ObjectRecord]


PLAN = Verb("plan", PlanRequest, PlanReply)
COMMIT = Verb("commit", CommitRequest, CommitReply)
EDITS = Verb("edits", LabRequest, EditsReply)
CODE_FILES = Verb("code-files", LabRequest, CodeFilesReply)
HOME_FILES = Verb("home-files", HomeFilesRequest, HomeFilesReply)
HASHES = Verb("hashes", PartsRequest, HashesReply)
MANIFEST = Verb("manifest", ManifestRequest, ManifestReply)
PULLED = Verb("pulled", PulledRequest, Empty)
FETCH = StreamingVerb("fetch", FetchRequest, Empty, FetchReply)
RESTORE_DISK = Verb("restore", RestoreDiskRequest, RestoreDiskReply)
