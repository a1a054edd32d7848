"""What `labctl status` knows of a lab."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labctl.model import Value

if TYPE_CHECKING:
    from labctl.model import Run, Server
    from labctl.state.disks import KeptDisk, StoppedDisk


class InterruptedDown(Value, frozen=True):
    """A `labctl run --down` that was interrupted at `at` (Unix seconds) by `why`, a signal's name.

    `run` is "" if labctl was not following a run.
    """

    run: str
    why: str
    at: float


class FreeDisk(Value, frozen=True):
    """The disk of a server, in bytes."""

    free_bytes: int
    total_bytes: int


class Clocks(Value, frozen=True):
    """A server's age and lab.yaml's limits, and whether its watchdog enforces them."""

    up_s: float
    ttl_s: float | None
    idle_s: float | None
    budget_usd: float | None
    enforced: bool


class LabStatus(Value, frozen=True):
    """A lab at `now` (Unix seconds): its server, runs, clocks and costs (US dollars).

    `keeper` is the host of the keeper that looks after the lab, "" if none does or the provider was
    not queried. `unfinished_up` is, for a lab without a `server`, whether an interrupted `labctl
    up` may have created one. `servers` are those beside it, of a lab that has several, also those
    beyond `count`, the number in lab.yaml. `joinable` is a running server that the lab does not
    hold and `labctl up` would join; only the provider knows it. `reachable` is None if the server
    was not queried, and `why` says why it did not answer. `provider_problem` is why a course's
    keeper did not answer, "" if it did; its part is as last known then. `watch` is the last report
    of the server's watchdog, {} before the first, with its last "decisions" if they were asked for,
    and `watched_at` its Unix second. `is_unguarded` is whether the server just answered and has no
    watchdog, since it has no limit, no price and no store. `executor` is how runs are started.
    `interrupted_down` is the last one on this server. `stopped` is the disk of a server that is
    stopped, and `stop_reasons` are the limits that may have stopped it: more than one if its last
    report does not tell them apart, none if labctl did. `kept` are the lab's disks that outlived a
    server. `moving` are the servers of an unfinished move beside the lab's own. `ended` maps server
    ids to the reason that the provider gave for their end, and `last_end` is that of the last
    server. `runs` begin with the newest, and `measured` are the ids of the probes among them that
    ended as planned.
    """

    lab: str
    lab_id: str
    executor: str
    keeper: str
    server: Server | None
    unfinished_up: bool
    servers: tuple[Server, ...]
    count: int
    joinable: Server | None
    reachable: bool | None
    why: str
    provider_problem: str
    disk: FreeDisk | None
    clocks: Clocks | None
    watch: dict[str, Any]
    watched_at: float | None
    is_unguarded: bool
    interrupted_down: InterruptedDown | None
    cost_usd: float
    stopped: StoppedDisk | None
    stop_reasons: tuple[str, ...]
    kept: tuple[KeptDisk, ...]
    moving: tuple[Server, ...]
    ended: dict[str, str]
    last_end: str
    runs: tuple[Run, ...]
    now: float
    measured: tuple[str, ...] = ()
