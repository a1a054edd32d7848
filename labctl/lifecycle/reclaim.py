"""A drill: the lab's server is taken back on purpose, and what that cost is measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from labctl.errors import (
    BusyError,
    ConnectError,
    NotFoundError,
    PolicyError,
    ProviderError,
    UsageError,
)
from labctl.events import Decision, Note, Step
from labctl.lifecycle import restore
from labctl.lifecycle.recover import recover
from labctl.model import Run, Server, Value
from labctl.providers import Reclaim
from labctl.runs import runs
from labctl.servers import guard, held_disks
from labctl.servers.accounts import ENDED
from labctl.servers.context import Ground

LOOK_S = 0.2
SAMPLE_S = 0.5
# So long is a run watched at most for how fast it goes.
SPEED_WITHIN_S = 5.0
GONE_WITHIN_S = 180.0
STEP_WITHIN_S = 900.0
BEFORE_END_S = 0.5
TOLD = "its server was taken back (a drill)"


class Drill(Value, frozen=True):
    """What one reclaim cost. Times are Unix seconds by this machine's clock.

    Steps are what the run itself says of them in logs/progress.json, None where it says nothing.
    `lost_steps` were done twice, which took `lost_s` at the speed before. `recover_s` is from the
    kill to the first new step. `cost_usd` pays for the lost steps, for the rest of the notice after
    the run had ended, and for the new server until its first step.
    """

    run: str
    server_id: str
    notice_s: float
    began_at: float
    announced: bool
    notice_at: float | None = None
    sigterm_at: float | None = None
    checkpoint: str = ""
    checkpoint_at: float | None = None
    mirrored_at: float | None = None
    gone_at: float = 0.0
    new_server_id: str = ""
    first_step_at: float | None = None
    last_step_before: float | None = None
    first_step_after: float | None = None
    steps_per_s: float | None = None
    lost_steps: float | None = None
    lost_s: float | None = None
    recover_s: float | None = None
    cost_usd: float | None = None


class _Seen:
    """What is seen of the run before its server goes. Samples are (server's clock, step)."""

    def __init__(self, ground: Ground, server: Server, run_id: str) -> None:
        self.ground, self.server = ground, server
        self.about = {"lab": ground.config.name, "lab_id": ground.lab_id}
        self.run_id = run_id
        self.samples: list[tuple[float, float]] = []
        self.ahead_s = 0.0
        self.reclaim: dict[str, Any] = {}

    def look(self) -> dict[str, Any]:
        """The run as the server tells it now. LabErrors as they come."""
        remote = self.ground.remote(self.server)
        reply = remote.call("status", {**self.about, "runs": [self.run_id]})
        if not reply["runs"]:
            raise NotFoundError(
                f"there is no run {self.run_id} on {self.server.alias}",
                hint="labctl status --refresh",
            )
        found: dict[str, Any] = reply["runs"][0]
        self.ahead_s = reply["now"] - time.time()
        at, step = found.get("progress_at"), found["progress"].get("step")
        if at and step is not None and (not self.samples or at > self.samples[-1][0]):
            self.samples.append((at, step))
        return found

    def look_at_notice(self) -> None:
        """Steps, and how far the wind-down is. A run that has been recorded tells no more steps."""
        self.look()
        request = {**self.about, "run": self.run_id}
        self.reclaim = self.ground.remote(self.server).call("reclaimed", request)["reclaim"]

    @property
    def step(self) -> float | None:
        return self.samples[-1][1] if self.samples else None

    @property
    def steps_per_s(self) -> float | None:
        """Between the first and the last that was seen; None for too few."""
        if len(self.samples) < 2:
            return None
        (first_at, first), (last_at, last) = self.samples[0], self.samples[-1]
        return (last - first) / (last_at - first_at) if last > first else None

    def here(self, at: float | None) -> float | None:
        """A moment of the server's clock, by this machine's."""
        return None if at is None else at - self.ahead_s


def drill(ground: Ground, run_id: str, notice_s: float, taker: Reclaim | None = None) -> Drill:
    """Take the server of a live run back and have the run recovered; asks before it does.

    `notice_s` 0 is without notice. `taker` stands for the provider where somebody else takes its
    servers back. PolicyError where the person says no; NotFoundError where nothing runs, or nothing
    of it would be there to go on from.
    """
    server = ground.server()
    taker = taker or _taker(ground)
    runs.refresh(ground, server)
    run = _live(ground, run_id)
    restore.record(ground, run.id)  # what could not go on elsewhere is not killed
    seen = _Seen(ground, server, run.id)
    _measure(ground, seen)
    _agree(ground, server, run, seen, notice_s)
    if notice_s and not guard.watch(ground, server).get("alive"):
        guard.arm(ground, server, always=True)
    began_at = time.time()
    announced = _taken(ground, server, taker, seen, notice_s)
    gone_at = _gone(ground, server)
    ground.state.record("reclaimed", lab_id=ground.lab_id, server_id=server.id, run_id=run.id)
    recovery = recover(ground, run.id, told=TOLD)
    new = ground.server()
    first_at, first_step = _first_step(ground, new, run.id)
    made = Drill(
        run=run.id,
        server_id=server.id,
        notice_s=notice_s,
        began_at=began_at,
        announced=announced,
        gone_at=gone_at,
        new_server_id=recovery.server_id,
        first_step_at=first_at,
        first_step_after=first_step,
    )
    return _reckoned(made, seen, server, new)


def _taker(ground: Ground) -> Reclaim:
    if isinstance(ground.provider, Reclaim):
        return ground.provider
    raise UsageError(
        f"servers of {ground.provider.name} are never taken back",
        why="there is nothing to rehearse on machines that stay",
        hint="labctl rehearse reclaim   # in a lab on local or a cloud",
    )


def _live(ground: Ground, run_id: str) -> Run:
    if run_id:
        run = runs.latest(ground, run_id)
        if run.state == "running":
            return run
        raise NotFoundError(f"run {run_id} does not run", why=run.told, hint="labctl run --detach")
    here = ground.server().id
    known = ground.state.runs(ground.lab_id)
    live = [one for one in known if one.state == "running" and one.server_id == here]
    if not live:
        raise NotFoundError("nothing runs, so nothing could be lost", hint="labctl run --detach")
    return live[-1]


def _measure(ground: Ground, seen: _Seen) -> None:
    """Watch the run for a moment, for its speed."""
    with _step(ground, "watching the run's steps"):
        until = time.monotonic() + SPEED_WITHIN_S
        while len(seen.samples) < 3 and time.monotonic() < until:
            seen.look()
            time.sleep(LOOK_S)


def _agree(ground: Ground, server: Server, run: Run, seen: _Seen, notice_s: float) -> None:
    stays = held_disks.is_held(ground, server)
    lost = "" if ground.config.store or stays else _only_there(ground, server)
    step = "" if seen.step is None else f" at step {seen.step:.0f}"
    told = f"{notice_s:.0f} s after a notice" if notice_s else "without notice"
    detail = f"{run.id} runs there{step}; it goes on on another server afterwards. {lost}".strip()
    disk = "its disk stays" if stays else "disk and all"
    question = f"have {server.alias} ({server.id}) taken back {told}, {disk}?"
    if not ground.reporter.ask(Decision(question=question, detail=detail)):
        raise PolicyError(
            "nothing was taken", why=f"{run.id} runs on", hint="labctl rehearse reclaim --yes"
        )


def _only_there(ground: Ground, server: Server) -> str:
    reply = ground.remote(server).call(
        "manifest", {"lab": ground.config.name, "lab_id": ground.lab_id, "runs": []}
    )
    count = sum(found["unpulled"] for found in reply["runs"].values())
    return (
        f"The lab has no store: {count} files that were not pulled will be LOST." if count else ""
    )


def _taken(ground: Ground, server: Server, taker: Reclaim, seen: _Seen, notice_s: float) -> bool:
    """Until the server is about to go; whether its provider itself gave the notice."""
    if not notice_s:
        seen.look()
        taker.reclaim(server.id, 0)
        return False
    announced = taker.reclaim(server.id, notice_s)
    end = time.monotonic() + notice_s
    if not announced:
        if taker.no_notice:
            text = f"{taker.no_notice}: the server's watchdog is handed one instead"
            ground.reporter.emit(Note(text=text))
        about = {"lab_id": ground.lab_id, "left_s": notice_s, "source": "labctl's drill"}
        ground.remote(server).call("reclaim-notice", about)
    with _step(ground, f"notice given, {notice_s:.0f} s"):
        while (left_s := end - time.monotonic()) > 0:
            if left_s > BEFORE_END_S:
                with suppress(ConnectError):
                    seen.look_at_notice()
            time.sleep(min(SAMPLE_S, max(0.0, end - time.monotonic())))
    if not announced:
        try:
            taker.reclaim(server.id, 0)
        except (ProviderError, NotFoundError):
            # Whoever follows the run may have heard the notice, and ended what was lost anyway.
            if ground.provider.find(server.id) is not None:
                raise
    return announced


def _gone(ground: Ground, server: Server) -> float:
    """When the provider said that the server has ended (Unix)."""
    with _step(ground, "the server goes"):
        until = time.monotonic() + GONE_WITHIN_S
        while time.monotonic() < until:
            found = ground.provider.find(server.id)
            if found is None or found.state in ENDED:
                return time.time()
            time.sleep(LOOK_S)
    raise BusyError(
        f"{server.id} is still there {GONE_WITHIN_S:.0f} s after its end",
        hint="labctl status --refresh",
    )


def _first_step(ground: Ground, server: Server, run_id: str) -> tuple[float | None, float | None]:
    """(when, which) the run first told on its new server; None where it ended without."""
    with _step(ground, f"{run_id}: its first new step"):
        seen = _Seen(ground, server, run_id)
        until = time.monotonic() + STEP_WITHIN_S
        while time.monotonic() < until:
            with suppress(ConnectError):
                found = seen.look()
                at = found.get("progress_at")
                if at and found.get("started_at") and at > found["started_at"]:
                    return seen.here(at), found["progress"].get("step")
                if found["state"] in ("exited", "lost", "cancelled"):
                    return None, None
            time.sleep(LOOK_S)
    return None, None


def _reckoned(made: Drill, seen: _Seen, old: Server, new: Server) -> Drill:
    from msgspec.structs import replace

    told, whole = seen.reclaim, seen.reclaim.get("whole") or {}
    before, after = seen.step, made.first_step_after
    lost = None if before is None or after is None else max(0.0, before - after + 1)
    rate = seen.steps_per_s
    lost_s = 0.0 if lost == 0 else (lost / rate if lost is not None and rate else None)
    first_at, ended_at = made.first_step_at, seen.here(told.get("ended_at"))
    cost = None
    if first_at is not None and lost_s is not None:
        idle_s = max(0.0, made.gone_at - ended_at) if ended_at else 0.0
        paid = old.offer.price_usd_per_hour * (lost_s + idle_s)
        paid += new.offer.price_usd_per_hour * max(0.0, first_at - new.created_at)
        cost = round(paid / 3600, 6)
    return replace(
        made,
        notice_at=seen.here((told.get("notice") or {}).get("heard_at")),
        sigterm_at=seen.here(told.get("sigterm_at")),
        checkpoint=whole.get("checkpoint") or "",
        checkpoint_at=seen.here(whole.get("at")),
        mirrored_at=seen.here(told.get("mirrored_at")),
        last_step_before=before,
        steps_per_s=rate,
        lost_steps=lost,
        lost_s=lost_s,
        recover_s=None if first_at is None else first_at - made.gone_at,
        cost_usd=cost,
    )


@contextmanager
def _step(ground: Ground, name: str) -> Iterator[None]:
    ground.reporter.emit(Step(name=name))
    yield
    ground.reporter.emit(Step(name=name, done=True))
