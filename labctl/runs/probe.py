"""A short run before the whole one: what the whole will take, here and on other offers.

The probe is a run like any other, with the same command on the same server, and is ended once it
has done enough. The training script says how far it is in logs/progress.json ("step",
"total_steps"); one that does not cannot be probed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from labctl.errors import BusyError, LabError, NoOfferError, UsageError
from labctl.estimate.cards import speed
from labctl.estimate.pace import Pace, Point, Whole, pace, whole
from labctl.events import Note, Progress
from labctl.model import Offer, Run, Server, Value
from labctl.runs import runs
from labctl.servers.context import Ground
from labctl.sync import lab_files

HOUR_S = 3600.0
POLL_S = 1.0
GRACE_S = 5
# How long a run may be silent about its steps: data may have to be read first.
PATIENCE_S = 900.0
SHOWN_OFFERS = 6
FILE = "logs/progress.json"
STEP = "probing"


class Amount(Value, frozen=True):
    """How much of the run the probe does, at least: a share of its steps, or so many of them."""

    share: float = 0.0
    steps: float = 0.0

    def of(self, total_steps: float) -> float:
        return self.steps or self.share * total_steps


class Elsewhere(Value, frozen=True):
    """The whole run on another offer. None: not known, since its speed is not."""

    offer: Offer
    seconds: float | None
    usd: float | None


class Probed(Value, frozen=True):
    """What a probe found. `finished` says that the run was over before the probe was: then `time`
    is what it took, without a range, and `pace` is None.

    `usd` is for this server's price; None where that is not known. `ends_before` names the limit
    that would end the server first ("ttl" or "budget"), "" for none known.
    """

    run: Run
    server: Server
    finished: bool
    total_steps: float
    time: Whole
    pace: Pace | None
    usd: float
    low_usd: float
    high_usd: float
    elsewhere: tuple[Elsewhere, ...] = ()
    offers_note: str = ""
    ends_before: str = ""


def amount(text: str) -> Amount:
    """`1%` or `200` (steps). UsageError for anything else."""
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if rest or not 0 < value < float("inf") or (percent and value >= 100):
        raise UsageError(
            f"--probe {text!r} is no share of a run",
            why="it takes a share of its steps below 100 %, or a number of steps",
            hint="labctl run --probe 1%   # or --probe 200",
        )
    return Amount(share=value / 100) if percent else Amount(steps=value)


def probe(
    ground: Ground,
    command: tuple[str, ...],
    wanted: Amount,
    *,
    push: bool = True,
    on_start: Callable[[Run], None] = lambda run: None,
    pause: Callable[[float], None] = time.sleep,
) -> Probed:
    """Run `command` (lab.yaml's, if empty) until enough of it is done, and end it.

    LabError where the run fails, or does not say how far it is. Whatever happens, interruption
    included, the probe does not go on.
    """
    server = ground.server()
    spec = runs.spec(ground, server, command, f"probe-{runs.new_id()}", False)
    if push:
        lab_files.push(ground, server, force=False)
    begun = runs.start(
        ground,
        server,
        spec,
        follow=False,
        on_start=lambda run, _: on_start(run),
        on_log=lambda block: None,
    )
    watched = _Watched(ground, server, begun)
    try:
        watched.until_enough(wanted, pause)
    finally:
        if not watched.run.ended:
            watched.run, _ = runs.cancel(ground, server, begun.id, GRACE_S)
    return _probed(ground, server, watched)


class _Watched:
    """The probe's run as it goes on: its points, and what the server says about its limits."""

    def __init__(self, ground: Ground, server: Server, run: Run) -> None:
        self.ground = ground
        self.server = server
        self.run = run
        self.points: list[Point] = []
        self.watch: dict[str, float | None] = {}
        self.total_steps = 0.0
        self.pace: Pace | None = None

    def until_enough(self, wanted: Amount, pause: Callable[[float], None]) -> None:
        silent_s = 0.0
        while True:
            silent_s = 0.0 if self._look() else silent_s + POLL_S
            if self.run.ended:
                self._check_ended()
                self.pace = None
                return
            target = wanted.of(self.total_steps)
            done = self.points[-1].step - self.points[0].step if self.points else 0.0
            self._say(done, target)
            self.pace = pace(self.points, self.run.started_at or self.run.created_at)
            if self.pace is not None and done >= target:
                return
            if silent_s > PATIENCE_S:
                raise self._silent(f"it has not told a step for {PATIENCE_S / 60:.0f} min")
            pause(POLL_S)

    def _look(self) -> bool:
        """Ask the server; whether the run has gone on. A cut link is taken up again."""
        about = {"lab": self.ground.config.name, "lab_id": self.ground.lab_id}
        try:
            reply = self.ground.remote(self.server).call("status", {**about, "runs": [self.run.id]})
        except BusyError as error:
            text = f"{error.what}; the probe goes on, trying again"
            self.ground.reporter.emit(Note(text=text, level="warning"))
            return False
        (found,) = reply["runs"]
        self.run = runs.keep(self.ground, self.server, found)
        self.watch = reply.get("watch") or {}
        step, at = self.run.progress.get("step"), found.get("progress_at")
        self.total_steps = self.run.progress.get("total_steps", 0.0)
        if step is None or at is None:
            return False
        if step and self.total_steps <= 0:
            raise self._silent('it does not tell "total_steps", the steps of the whole run')
        fresh = not self.points or step != self.points[-1].step
        if fresh:
            self.points.append(Point(float(at), step))
        return fresh

    def _say(self, done: float, target: float) -> None:
        event = Progress(name=STEP, done=min(done, target), total=target, unit="steps")
        self.ground.reporter.emit(event)

    def _silent(self, why: str) -> LabError:
        return LabError(
            f"run {self.run.id} cannot be probed",
            why=f"{why}. A training script says how far it is by writing\n"
            f'{{"step": 12, "total_steps": 4000}} to $LABCTL_RUN_DIR/{FILE} now and then',
            hint="labctl run   # without a probe",
        )

    def _check_ended(self) -> None:
        if self.run.exit_code != 0:
            raise LabError(
                f"the probe ended before it could tell: {self.run.told}",
                hint=f"labctl logs {self.run.id}",
            )


def _probed(ground: Ground, server: Server, watched: _Watched) -> Probed:
    run, found = watched.run, watched.pace
    finished = found is None
    if found is None:
        took = max(0.0, (run.ended_at or time.time()) - (run.started_at or run.created_at))
        times = Whole(seconds=took, low_s=took, high_s=took)
    else:
        times = whole(found, watched.total_steps)
    price = server.offer.price_usd_per_hour
    elsewhere, note = ((), "") if finished else _elsewhere(ground, server, times)
    return Probed(
        run=run,
        server=server,
        finished=finished,
        total_steps=watched.total_steps,
        time=times,
        pace=found,
        usd=times.seconds / HOUR_S * price,
        low_usd=times.low_s / HOUR_S * price,
        high_usd=times.high_s / HOUR_S * price,
        elsewhere=elsewhere,
        offers_note=note,
        ends_before="" if finished else ends_before(watched.watch, times.seconds),
    )


def ends_before(watch: dict[str, float | None], seconds: float) -> str:
    """The limit of the server that comes before the run's end; "" where none is known."""
    for name in ("ttl", "budget"):
        left = watch.get(f"{name}_left_s")
        if left is not None and left < seconds:
            return name
    return ""


def _elsewhere(ground: Ground, server: Server, times: Whole) -> tuple[tuple[Elsewhere, ...], str]:
    """Other offers for the same need, the cheapest whole run first."""
    if not server.offer.price_usd_per_hour:
        return (), ""
    try:
        offers = ground.provider.offers(ground.config.server.need)
    except NoOfferError:
        return (), ""
    except LabError as error:
        return (), f"other offers are not known: {error.what}"
    rows = [compared(server.offer, one, times.seconds) for one in offers]
    best: dict[tuple[str, bool], Elsewhere] = {}
    for row in sorted(rows, key=_rank):
        key = (row.offer.type, row.offer.spot)
        if key != (server.offer.type, server.offer.spot):
            best.setdefault(key, row)
    return tuple(best.values())[:SHOWN_OFFERS], ""


def _rank(row: Elsewhere) -> tuple[bool, float]:
    return row.usd is None, row.offer.price_usd_per_hour if row.usd is None else row.usd


def compared(here: Offer, there: Offer, seconds: float) -> Elsewhere:
    """The same type takes as long. Another GPU takes as much longer as its fp16 peak is lower: true
    where the GPU is what the run waits for. Anything else is not known."""
    factor: float | None = 1.0 if here.type == there.type else None
    if factor is None and here.gpu_count and here.gpu_count == there.gpu_count:
        own = speed(here.gpu_name, here.gpu_memory_bytes, "fp16")
        other = speed(there.gpu_name, there.gpu_memory_bytes, "fp16")
        factor = own / other if own and other else None
    took = None if factor is None else seconds * factor
    usd = None if took is None else took / HOUR_S * there.price_usd_per_hour
    return Elsewhere(offer=there, seconds=took, usd=usd)
