"""Messages about runs, and the records of a run in its directory on the server.

Times are Unix seconds of the server's clock, sizes are in bytes.
"""

from typing import Dict, NamedTuple, Optional, Tuple, Union

from .codec import with_keys
from .verbs import LabRequest, StreamingVerb, Verb

# The names of the executors.
DOCKER, PROCESS, SLURM = "docker", "process", "slurm"
# what runs the image of a run that is a job, on the machines of a course with Slurm
BROKER = "broker"
# The limit (limit.json) that ended a run whose time with a shared GPU was over.
GPU_LEASE = "GPU lease"
# in place of a limit: the run was stopped so that another server can resume it
MOVE = "move"
# The environments of plain processes are named after this and a hash of their content.
ENVIRONMENT = "labctl/environment"


class JobRequest(NamedTuple):
    """What a run asks of Slurm; "" and 0 leave it to the cluster's defaults.

    `gpus` is a value of `sbatch --gres`, such as "gpu:a100:2". `modules` are loaded with
    `module load`. `options` are further options of sbatch by their long names. `runtime` runs the
    image of a run that is a container: "apptainer", "pyxis", "podman", "broker" or "auto".
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    time_s: int = 0
    gpus: str = ""
    modules: Tuple[str, ...] = ()
    options: Dict[str, str] = {}
    runtime: str = ""


class RunSpec(NamedTuple):
    """The complete specification of a run, without its secrets (spec.json).

    The hash of its JSON claims the run's id. `command` is argv for the container. `image` is a
    reference that exists on the server. `gpus` is "" (no GPU), "all" or device UUIDs joined by
    commas. Sizes are in bytes; 0 is no limit. `data` has the full path on the server of each data
    set that is already there, by its name. `executor` runs the command there: in a container, as
    a plain process, which has no image, or as a job of Slurm, for which `job` is.
    """

    id: str
    lab: str
    lab_id: str
    command: Tuple[str, ...]
    image: str
    env: Dict[str, str]
    secrets: Tuple[str, ...] = ()
    outputs: Tuple[str, ...] = ("checkpoints", "logs")
    gpus: str = ""
    memory_bytes: int = 0
    cpus: float = 0.0
    shm_bytes: int = 0
    tty: bool = False
    data: Dict[str, str] = {}
    executor: str = DOCKER
    job: JobRequest = JobRequest()


class GangMember(NamedTuple):
    """The place of one server in a run on several servers (gang.json).

    `rank` counts the servers from 0, `size` is their number. Their processes meet at
    `address`:`port`, on the server of rank 0, and reach one another over the network `interface`
    of this server; "" leaves the choice to the program.
    """

    rank: int
    size: int
    address: str
    port: int
    interface: str = ""


class ClaimRecord(NamedTuple):
    """The claim of a run's id (claim.json). `hash` is the SHA-256 of the spec's JSON."""

    hash: str = ""
    created_at: float = 0.0


class AttemptRecord(NamedTuple):
    """One attempt of a run (attempt-N), the same as `AttemptRecord()` if there was none.

    `boot` is the token of the machine's boot in which it started. `launched` is written once its
    container has started.
    """

    container: str = ""
    boot: str = ""
    image_id: str = ""
    image_digest: str = ""
    started_at: Optional[float] = None
    launched: bool = False


class ExitRecord(NamedTuple):
    """How a run's command ended, as entry.sh writes it (exit.json).

    `asked` is the last signal that it received, such as "TERM", "" for none.
    """

    code: int
    ended_at: float
    peak_memory_bytes: int = 0
    oom_kills: int = 0
    asked: str = ""


class LimitRecord(NamedTuple):
    """What ended a run from outside (limit.json); "" for nothing.

    That is a limit ("ttl", "budget"), a GPU lease, or a move to another server.
    """

    by: str = ""
    at: float = 0.0


class LogOffsetRecord(NamedTuple):
    """The byte of the run's log at which its last attempt began (resumed.json)."""

    offset: int = 0


class DiskRestoreRecord(NamedTuple):
    """The disk that a run was restored from, and its last container there (restored.json)."""

    disk: str = ""
    container: str = ""


@with_keys(summary="told")
class RunRecord(NamedTuple):
    """The state of a run; of one that has ended, its final record (record.json).

    `state` is "claimed" (no container yet), "starting", "running", "exited", "lost" or
    "cancelled"; the store's copy may have "unknown". `summary` is a text for users: how the run
    ended, or what is wrong while it runs. `progress` are the numbers in logs/progress.json, which
    was written at `progress_at`. `log_offset` is the byte of the log at which the last attempt
    began. `new_files` were made outside of the outputs. `exit_code` is null while the run is
    active, and if it is not known. `gpu_lost_at` is when its container was first seen without
    access to its GPUs. `stopped_by` names the limit that ended a lost run. `oom_limit_bytes` is
    the memory limit at which it was killed: 0 for the server's own memory, None if it was not.
    `has_checkpoints`: it has ended, and its directory for checkpoints has a file.
    """

    id: str
    state: str
    lab_id: str = ""
    command: Tuple[str, ...] = ()
    image: str = ""
    created_at: float = 0.0
    started_at: Optional[float] = None
    ended_at: Optional[float] = None
    exit_code: Optional[int] = None
    summary: str = ""
    container: str = ""
    image_id: str = ""
    image_digest: str = ""
    progress: Dict[str, float] = {}
    progress_at: Optional[float] = None
    log_offset: int = 0
    new_files: Tuple[str, ...] = ()
    stopped_by: str = ""
    gpu_lost_at: Optional[float] = None
    oom_limit_bytes: Optional[int] = None
    executor: str = DOCKER
    has_checkpoints: bool = False


class ProcessAttemptRecord(NamedTuple):
    """An attempt that runs without a container (attempt.json in its own directory).

    `directory` is the run's. `boot` is the token of the machine's boot in which it was created.
    """

    run: str
    lab_id: str
    directory: str
    boot: str


class SlurmAttemptRecord(NamedTuple):
    """An attempt that is a job of Slurm (attempt.json in its own directory).

    `directory` is the run's. `job_id` is "" until Slurm's reply has arrived: the job's name, which
    no other attempt has, finds it all the same.
    """

    run: str
    lab_id: str
    directory: str
    job_name: str
    created_at: float
    job_id: str = ""


class ProcessRecord(NamedTuple):
    """The first process of such an attempt, as entry.sh writes it (process.json).

    `start_ticks` is when it started, in clock ticks since boot: field 22 of /proc/PID/stat.
    """

    pid: int
    start_ticks: int


class StallRecord(NamedTuple):
    """What the last check of a run's progress saw (stall.json).

    `changed_at` is when an output file of the `attempt` had changed last. A check first saw that at
    `since_s` of the monotonic clock of this `boot`.
    """

    attempt: str = ""
    boot: str = ""
    changed_at: float = 0.0
    since_s: float = 0.0


class GpuAccessRecord(NamedTuple):
    """The access of a container to its GPUs. Times are Unix seconds; None if it never happened."""

    container: str = ""
    opened_at: Optional[float] = None
    refused_at: Optional[float] = None
    lost_at: Optional[float] = None


class RunRequest(NamedTuple):
    """A request about one run of a lab."""

    lab: str
    lab_id: str
    run: str


class StartRunRequest(NamedTuple):
    """Start a run. `secrets` are the values of the spec's secrets by name.

    With `held`, its container is only created. The caller starts it by attaching a terminal, so
    that the terminal has all of the output, and the command's exit code. A `member` of a run on
    several servers is started by START_HELD, once it exists on all of them.
    """

    spec: RunSpec
    secrets: Dict[str, str] = {}
    held: bool = False
    member: Optional[GangMember] = None


class StartRunReply(NamedTuple):
    """The run, or in `missing` the image that is not on the server; then nothing was claimed.

    `found`: an identical request had started the run before. `directory` is the run's, on the
    server. `active` has the ids of the lab's other runs that run beside it, the newest first.
    `member` is the place of its last attempt in a run on several servers.
    """

    run: Optional[RunRecord] = None
    found: bool = False
    directory: str = ""
    missing: str = ""
    active: Tuple[str, ...] = ()
    member: Optional[GangMember] = None


class FollowRunRequest(NamedTuple):
    """Stream a run's log from byte `offset`, or from `tail` lines before the end if not 0.

    With `wait` the stream ends with the run. `attempt` is the container for which the caller
    counted its offset, "" if it has none. `process` is that of torchrun on this server; the output
    of the first, 0, is the run's log.
    """

    lab: str
    lab_id: str
    run: str
    offset: int = 0
    tail: int = 0
    wait: bool = False
    attempt: str = ""
    process: int = 0


class FollowRunOpening(NamedTuple):
    """The run, and the byte of the log at which the stream begins."""

    run: RunRecord
    offset: int


class FollowRunResult(NamedTuple):
    run: RunRecord


class StatusRequest(NamedTuple):
    """The state of these runs, or of all runs of the lab if `runs` is empty."""

    lab: str
    lab_id: str
    runs: Tuple[str, ...] = ()


class DiskSpace(NamedTuple):
    free_bytes: int
    total_bytes: int


class StatusReply(NamedTuple):
    """`watch` is the watchdog's report, a WatchRecord, null if no watchdog guards the lab.

    It is checked where it is read, so that a forged report does not hide the runs.
    """

    runs: Tuple[RunRecord, ...]
    disk: DiskSpace
    uptime_s: float
    now: float
    watch: object = None


class CancelRunRequest(NamedTuple):
    """Stop a run: SIGTERM, and SIGKILL after `grace_s` seconds.

    With a `reason`, the run has failed for that reason, and was not canceled by its user. With
    `moves`, it is a lost run then, which another server resumes.
    """

    lab: str
    lab_id: str
    run: str
    grace_s: int = 60
    reason: str = ""
    moves: bool = False


class CancelRunReply(NamedTuple):
    """`already`: the run had ended before."""

    run: RunRecord
    already: bool


class ProcessOutput(NamedTuple):
    """When a process of torchrun on this server printed last: `started_at` if it has not yet.

    The first one, 0, is the program itself without torchrun. What the run reports counts as its.
    """

    process: int
    started_at: float
    printed_at: float


class StallReply(NamedTuple):
    """Since when a running run shows no progress on this server.

    `stalled_s` is the time since a check first saw what is there now, None if it does not run.
    """

    stalled_s: Optional[float] = None
    outputs: Tuple[ProcessOutput, ...] = ()
    now: float = 0.0


@with_keys(reason="told")
class ResumeRunRequest(NamedTuple):
    """Start the next attempt of a lost run. `reason` is written to its log where the gap is.

    That of a `member` of a run on several servers is only created, as in StartRunRequest. It may
    have ended by itself, or been ended with the others.
    """

    spec: RunSpec
    secrets: Dict[str, str] = {}
    reason: str = ""
    member: Optional[GangMember] = None


class ResumeRunReply(NamedTuple):
    """As `StartRunReply`. `offset` is the byte of the log at which the gap is marked.

    `step` is the step that the newest complete checkpoint records, null if it records none.
    """

    run: Optional[RunRecord] = None
    found: bool = False
    directory: str = ""
    offset: int = 0
    step: Union[int, float, None] = None
    missing: str = ""
    member: Optional[GangMember] = None


class AdoptPushedRequest(NamedTuple):
    """Make a lost run of the files that were pushed for it. `attempts` is how often it ran.

    If the run is there already, with `completes` it gets the checkpoints, in place of its own. With
    `replaces` the pushed files are the newer ones: an inactive run that is there is set aside.
    """

    spec: RunSpec
    created_at: float
    attempts: int
    completes: bool = False
    replaces: bool = False


class AdoptPushedReply(NamedTuple):
    run: RunRecord


class ClearRunsReply(NamedTuple):
    """The ended runs, whose containers and sessions are removed now."""

    cleared: Tuple[str, ...]


class SessionReply(NamedTuple):
    """The name of the run's tmux session, and whether the run has ended."""

    session: str
    ended: bool = False


START_RUN = Verb("start", StartRunRequest, StartRunReply)
START_HELD = Verb("start-held", RunRequest, StartRunReply)
RUN = StreamingVerb("run", StartRunRequest, StartRunReply, StartRunReply)
FOLLOW_RUN = StreamingVerb("follow", FollowRunRequest, FollowRunOpening, FollowRunResult)
STATUS = Verb("status", StatusRequest, StatusReply)
CANCEL_RUN = Verb("cancel", CancelRunRequest, CancelRunReply)
MEASURE_STALL = Verb("stall", RunRequest, StallReply)
RESUME_RUN = Verb("resume", ResumeRunRequest, ResumeRunReply)
ADOPT_PUSHED = Verb("restore-pushed", AdoptPushedRequest, AdoptPushedReply)
CLEAR_RUNS = Verb("clear", LabRequest, ClearRunsReply)
OPEN_SESSION = Verb("session", RunRequest, SessionReply)
