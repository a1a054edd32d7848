"""Messages and files of the watchdog.

Spans are in seconds, dollars in US dollars, times (`at`, `..._at`) in Unix seconds of the server's
clock. "Elapsed" is the server's age. Watchdogs of other versions read and write the files.
"""

from typing import Dict, NamedTuple, Optional, Tuple, Union

from .verbs import Empty, Verb

# EC2's metadata service, which other clouds have at the same address.
IMDS_HOST = "169.254.169.254"
IMDS = f"http://{IMDS_HOST}"


class ServerLimits(NamedTuple):
    """The limits of a server. None is no limit. `ceiling_s` bounds `ttl_s` with all extensions.

    `from_s` (elapsed) is when the ttl began, 0 but for a server that was off at its deadline and
    was started again. Until `held_until_s` (elapsed) an extension keeps idleness from ending it.
    `stopped_s` is how long it was stopped, which the budget does not pay for.
    """

    ttl_s: Optional[float] = None
    idle_s: Optional[float] = None
    budget_usd: Optional[float] = None
    price_usd_per_hour: float = 0.0
    ceiling_s: Optional[float] = None
    extended_s: float = 0.0
    from_s: float = 0.0
    held_until_s: float = 0.0
    stopped_s: float = 0.0

    @property
    def deadline_s(self) -> Optional[float]:
        """Elapsed time of the hard deadline. Without a ttl, a ceiling is one."""
        spans = [] if self.ttl_s is None else [self.ttl_s + self.extended_s]
        spans += [] if self.ceiling_s is None else [self.ceiling_s]
        return self.from_s + min(spans) if spans else None

    @property
    def budget_end_s(self) -> Optional[float]:
        """Elapsed time at which the budget is spent."""
        if self.budget_usd is None or self.price_usd_per_hour <= 0:
            return None
        return self.budget_usd / self.price_usd_per_hour * 3600 + self.stopped_s

    @property
    def latest_s(self) -> Optional[float]:
        """Elapsed time at which the server ends even if it is busy; None without such a limit."""
        ends = [end for end in (self.deadline_s, self.budget_end_s) if end is not None]
        return min(ends) if ends else None


class GuardLimits(NamedTuple):
    """The limits that a client requests; None for a limit that is not set.

    `budget_usd` limits this server's cost, `budget_whole_usd` that of all servers of the lab.
    """

    ttl_s: Optional[float] = None
    ttl_is_default: bool = False
    idle_s: Optional[float] = None
    budget_usd: Optional[float] = None
    budget_whole_usd: Optional[float] = None
    price_usd_per_hour: float = 0.0
    ceiling_s: Optional[float] = None


class EndingRecord(NamedTuple):
    """How the server ends. `kind` is "poweroff" or "release", `disk` "stays", "keepable" or "goes".

    `lease` is the lease of a shared machine. `grace_s` is how long a run has after SIGTERM, 0 for
    the watchdog's default. `saver_s` is how long before a limit runs stop, so that a keeper can
    download results; 0 without a keeper.
    """

    kind: str
    disk: str = "stays"
    lease: str = ""
    grace_s: float = 0.0
    saver_s: float = 0.0


class ElapsedTimeRecord(NamedTuple):
    """The elapsed time at one moment. `boot` identifies the boot that `boottime_s` counts from."""

    boot: str
    boottime_s: float
    wall_s: float
    elapsed_s: float


class LimitsRecord(NamedTuple):
    """limits.json: what the watchdog enforces, and for which lab and account.

    `edition` increases with each change. `mirror_s` 0 is the default interval. `notices` names the
    metadata service that gives notice of a reclaim; "" is EC2's.
    """

    edition: int
    lab: str
    lab_id: str
    server_id: str
    uid: int
    gid: int
    home: str
    limits: ServerLimits
    age: ElapsedTimeRecord
    ending: EndingRecord
    budget_whole_usd: Optional[float] = None
    store: str = ""
    mirror_s: float = 0.0
    notices: str = ""


class StateRecord(NamedTuple):
    """state.json: what a watchdog resumes with after a crash or a reboot.

    `warned` has the warnings that were sent, by the name of their clock. `ending` is the limit that
    ends the server now, `ended` the one that its wind-down has finished for. `counted_s` (elapsed)
    is up to when idle time was added up. `released` is the server that was released.
    """

    server_id: str = ""
    boot: str = ""
    boottime_s: float = 0.0
    wall_s: float = 0.0
    elapsed_s: float = 0.0
    rate_bytes_s: float = 0.0
    edition: int = 0
    warned: Optional[Dict[str, Tuple[float, ...]]] = None
    counted_s: float = 0.0
    idle_for_s: float = 0.0
    idle_total_s: float = 0.0
    ending: str = ""
    ended: str = ""
    overrun_s: float = 0.0
    released: str = ""

    @property
    def age(self) -> Optional[ElapsedTimeRecord]:
        """The elapsed time that was recorded last; None for a watchdog that starts anew."""
        if not self.boot:
            return None
        return ElapsedTimeRecord(self.boot, self.boottime_s, self.wall_s, self.elapsed_s)


class DecisionRecord(NamedTuple):
    """A line of decisions.jsonl."""

    at: float
    elapsed_s: float
    what: str
    why: str


class UnsavedCountRecord(NamedTuple):
    """Results that exist only on this server."""

    files: int = 0
    bytes: int = 0


class NoticeRecord(NamedTuple):
    """A provider's notice that a run was stopped for: what `action` will be taken, and by whom."""

    kind: str = ""
    action: str = ""
    source: str = ""
    heard_at: float = 0.0
    ends_at: float = 0.0


class ReclaimRecord(NamedTuple):
    """A reclaim under way. `ready_at` is when runs had ended and all that is possible was saved."""

    kind: str = ""
    action: str = ""
    source: str = ""
    heard_at: float = 0.0
    ends_at: float = 0.0
    ready_at: Optional[float] = None


class MirrorStateRecord(NamedTuple):
    """The mirror: when it was last complete (0 for never), and why it failed since ("")."""

    at: float = 0.0
    behind_bytes: int = 0
    failed: str = ""


class WatchRecord(NamedTuple):
    """status.json, and what the verb `watch` makes of it: `alive` and the last `decisions`.

    Clocks that do not run have None left. `ends_by` is the limit that ends the server first,
    `ends_in_s` when the wind-down for it begins. `busy` says why the server is not idle, `cannot`
    what could not be saved at its end (None: not known yet). `timer` is whether the timer of the
    first boot runs. `gpu_percent` is the use of all GPUs together, 100 for each that is fully used;
    None if it is not known.
    """

    alive: bool = False
    decisions: Tuple[DecisionRecord, ...] = ()
    server_id: str = ""
    lab_id: str = ""
    version: str = ""
    edition: int = 0
    boot: str = ""
    boottime_s: float = 0.0
    elapsed_s: float = 0.0
    ttl_left_s: Optional[float] = None
    budget_left_s: Optional[float] = None
    idle_for_s: float = 0.0
    idle_left_s: Optional[float] = None
    ends_in_s: Optional[float] = None
    ends_by: str = ""
    idle_total_s: float = 0.0
    spent_usd: float = 0.0
    busy: Tuple[str, ...] = ()
    gpu_percent: Optional[float] = None
    timer: bool = False
    cannot: Optional[Tuple[str, ...]] = None
    unsaved: UnsavedCountRecord = UnsavedCountRecord()
    ending: str = ""
    overrun_s: float = 0.0
    reclaim: Optional[ReclaimRecord] = None
    mirror: Optional[MirrorStateRecord] = None
    pid: int = 0


class GuardRequest(NamedTuple):
    """Arm the watchdog of a server that is `elapsed_s` old, and was stopped for `stopped_s` of it.

    `uid`, `gid` and `home` are of the account that owns the lab, once root repeats the request.
    """

    lab: str
    lab_id: str
    server_id: str
    limits: GuardLimits
    ending: EndingRecord
    elapsed_s: float = 0.0
    store: str = ""
    mirror_s: float = 0.0
    stopped_s: float = 0.0
    uid: Optional[int] = None
    gid: int = 0
    home: str = ""
    notices: str = ""


class WatchRequest(NamedTuple):
    """`decisions` is how many of the last ones to report."""

    lab_id: str
    decisions: int = 0


class ExtendRequest(NamedTuple):
    lab_id: str
    span_s: float


class WatchReply(NamedTuple):
    """None if the lab has no watchdog here."""

    watch: Optional[WatchRecord] = None


class ReclaimNoticeRequest(NamedTuple):
    """Have the watchdog act as after a provider's notice, `left_s` before the server's end."""

    lab_id: str
    left_s: float
    kind: str = "interruption"
    action: str = "terminate"
    source: str = "labctl"


class ClientNoticeRecord(NamedTuple):
    """notice.json: a notice that a client gave. `ends_s` is in seconds since boot."""

    boot: str
    ends_s: float
    kind: str
    action: str
    source: str
    stamp: str


class CheckpointRecord(NamedTuple):
    """A complete checkpoint: its path below the run. `step` is None if its manifest has none."""

    checkpoint: str
    step: Union[int, float, None]
    at: float


class RunReclaimRecord(NamedTuple):
    """reclaim.json of a run whose server is being reclaimed.

    `step` is the last one before, from the run's progress.json. `whole` is the checkpoint that was
    written after SIGTERM. `mirrored_at` is when all results were in the store.
    """

    container: str = ""
    notice: NoticeRecord = NoticeRecord()
    version: int = 1
    step: Union[int, float, None] = None
    sigterm_at: Optional[float] = None
    whole: Optional[CheckpointRecord] = None
    ended_at: Optional[float] = None
    mirrored_at: Optional[float] = None


class ReadReclaimRequest(NamedTuple):
    lab: str
    lab_id: str
    run: str


class ReadReclaimReply(NamedTuple):
    """None if the run was never stopped for a reclaim."""

    reclaim: Optional[RunReclaimRecord] = None


class KeepDiskRequest(NamedTuple):
    """Have EC2 keep the server's disks until `expires`; `probe` only asks whether it would.

    `imds` and `endpoint` replace the addresses of the metadata service and of EC2.
    """

    expires: float
    probe: bool = False
    imds: str = IMDS
    endpoint: str = ""


class KeepDiskReply(NamedTuple):
    """The ids of the disks."""

    volumes: Tuple[str, ...]


class ReloadUnitsReply(NamedTuple):
    """The containers with a GPU that the reload waits for; empty once it is done."""

    put_off_for: Tuple[str, ...]


GUARD = Verb("guard", GuardRequest, WatchReply)
WATCH = Verb("watch", WatchRequest, WatchReply)
EXTEND = Verb("extend", ExtendRequest, WatchReply)
RECLAIM_NOTICE = Verb("reclaim-notice", ReclaimNoticeRequest, Empty)
READ_RECLAIM = Verb("reclaimed", ReadReclaimRequest, ReadReclaimReply)
KEEP_DISK = Verb("keep-disk", KeepDiskRequest, KeepDiskReply)
RELOAD_UNITS = Verb("reload-units", Empty, ReloadUnitsReply)
