"""An assignment graded: every submission that counts, one after another, each in two containers.

One that fails stops no other. Run again, it goes on: what has a grade by the same submission, data,
grader and image keeps it, and only lateness is looked at anew.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from labctl.config.course_schema import AssignmentConfig, GradeConfig
from labctl.courses import collect as collecting
from labctl.courses.collect import Collection, Handed, rules_of
from labctl.courses.evidence import flagged
from labctl.courses.grade_store import Shelf
from labctl.courses.grades import keep_released
from labctl.courses.grading.claims import compared
from labctl.courses.grading.record import Outcome, Record, told_of
from labctl.courses.grading.results import Results, after_penalty, failed, parse_results
from labctl.courses.grading_material import (
    bring,
    entries,
    limits_of,
    material,
    name_there,
    own_word,
)
from labctl.courses.grading_server import GradingServer, end_forgotten, grading_server
from labctl.courses.records.folder import Seat
from labctl.courses.servers import Staff
from labctl.errors import ConfigError, ConnectError, InterruptError, LabError, PolicyError
from labctl.model import Value
from labctl.runs.evaluation import Evaluation
from labctl.submissions import bundle

PYTHON = ("sh", "-c", 'command -v python >/dev/null && exec python "$@"; exec python3 "$@"', "run")
PREDICT = (*PYTHON, "/lab/labctl/images.py")
ACCURACY = (*PYTHON, "/lab/labctl/accuracy.py")
# What the way there and starting two containers may take beside the two time limits.
LINK_S = 90.0


class Graded(Value, frozen=True):
    """One seat. `fresh`: it was run now. `state` is a Record's outcome, or why there is none.

    `corrected` names whose results.json a person has edited: theirs was left as it is.
    """

    seat: str
    state: str
    record: Record | None = None
    fresh: bool = False
    why: str = ""
    corrected: tuple[str, ...] = ()


class Grading(Value, frozen=True):
    """What came of an assignment. `unreached` seats were not run: the server was lost."""

    assignment: str
    seats: tuple[Graded, ...]
    unreached: tuple[str, ...] = ()
    why: str = ""

    @property
    def whole(self) -> bool:
        """Whether every submission that counts has a grade."""
        return not self.unreached and all(one.state != "error" for one in self.seats)


class _Job(Value, frozen=True):
    """What is to be run: a seat's submission, and the hash of all that its grade depends on."""

    handed: Handed
    key: str


def grade(
    staff: Staff,
    name: str,
    seats: Sequence[Seat] = (),
    *,
    again: bool = False,
    keep: bool = False,
    at_once: int = 1,
    profile: str = "",
    tell: Callable[[Graded], None] = lambda graded: None,
) -> Grading:
    """Grade what these seats (all) handed in; `tell` hears of each as it is done.

    No server is made where nothing is to be run. PolicyError where the grading server is none that
    strangers' code may run on.
    """
    rules = rules_of(staff.folder, name)
    if rules.grade is None:
        raise ConfigError(
            f"course.yaml does not say how {name} is graded",
            hint=f"edit {staff.folder.config.path}: assignments: {name}: grade: "
            f"{{inputs: assignments/{name}/inputs, labels: assignments/{name}/labels}}",
        )
    found = collecting.collect(staff.folder, name, seats, profile=profile, by=staff.by)
    batch = _Batch(staff, name, rules, rules.grade, found, tell, again=again, whole=not seats)
    # A second one would have the server emptied under it.
    with staff.state.exclusive(f"{staff.folder.id}-grade", "course grade", wait_s=0.5):
        keep_released(staff.folder, name, staff.by)
        batch.run(keep, at_once)
    return batch.result()


class _Batch:
    """One assignment's submissions on their way to grades."""

    def __init__(
        self,
        staff: Staff,
        name: str,
        rules: AssignmentConfig,
        how: GradeConfig,
        found: Collection,
        tell: Callable[[Graded], None],
        *,
        again: bool,
        whole: bool,
    ) -> None:
        self.staff = staff
        self.name = name
        self.rules = rules
        self.how = how
        self.found = found
        self.again = again
        self.whole = whole
        self.stopped = False
        self.tell = tell
        self.shelf = Shelf(staff.folder, name, staff.by)
        self.material = material(staff, name, how)
        self.done: dict[str, Graded] = {}
        self.unreached: list[str] = []
        self.why = ""

    def run(self, keep: bool, at_once: int) -> None:
        jobs = []
        for handed in self.found.here:
            job = _Job(handed=handed, key=self.key(handed))
            known = self.shelf.read(handed.seat)
            if known and known.key == job.key and known.outcome != "error" and not self.again:
                self.keep(handed, self.timely(known, handed), fresh=False)
            else:
                jobs.append(job)
        if jobs:
            with grading_server(self.staff, keep=keep) as server:
                server.ready_image()
                bring(server, self.name, self.material)
                self.all(server, jobs, 1 if server.gpus() else at_once)
        elif not keep:
            end_forgotten(self.staff)
        self.look_at_all()

    def all(self, server: GradingServer, jobs: Sequence[_Job], at_once: int) -> None:
        threads = ThreadPoolExecutor(at_once, thread_name_prefix="labctl-grade")
        try:
            for _ in threads.map(lambda job: self.one(server, job), jobs):
                pass
        except KeyboardInterrupt:
            self.stopped = True
            raise InterruptError(
                "interrupted while submissions were graded",
                why=f"{len(self.done)} have their grades, and keep them",
                hint=f"labctl course grade {self.name}   # goes on",
            ) from None
        finally:
            # What still runs there ends when the server is emptied.
            threads.shutdown(wait=not self.stopped, cancel_futures=True)

    def key(self, handed: Handed) -> str:
        """Of everything that the grade comes from."""
        grading = self.staff.folder.config.grading
        parts = [
            handed.sha256,
            msgspec.json.encode(self.how).decode(),
            repr(grading.lab.limits if grading else ""),
            repr(grading.lab.image if grading else ""),
            f"{self.rules.points}",
            *self.material.lines(),
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def one(self, server: GradingServer, job: _Job) -> None:
        """Grade one submission; what goes wrong with it is written down, and that is all."""
        if self.unreached and not self.stopped:
            self.unreached.append(job.handed.seat)
            return
        begun = time.monotonic()
        evaluation: Evaluation | None = None
        try:
            reply, evaluation = self.asked(server, job)
            made = self.record(job, reply, evaluation, server.image)
        except ConnectError as error:
            self.unreached.append(job.handed.seat)
            self.why = " ".join(filter(None, [error.what, error.why]))
            return
        except (LabError, OSError) as error:
            what = error.what if isinstance(error, LabError) else str(error)
            why = error.why if isinstance(error, LabError) else ""
            made = self.empty(job, "error", told=" ".join(filter(None, [what, why])))
            reply = {}
        if self.stopped:
            return
        made = msgspec.structs.replace(made, seconds=round(time.monotonic() - begun, 3))
        said = str((reply.get("predict") or {}).get("said", ""))
        self.keep(job.handed, made, fresh=True, said=said)

    def asked(self, server: GradingServer, job: _Job) -> tuple[dict[str, Any], Evaluation | None]:
        """Send a submission and have it run; (the server's reply, the submission's own word)."""
        private = self.staff.folder.private / "grading"
        private.mkdir(mode=0o700, exist_ok=True)
        name = f"sub-{job.handed.sha256[:32]}"
        with tempfile.TemporaryDirectory(dir=private) as place:
            root = Path(place) / "bundle"
            with Path(job.handed.bundle).open("rb") as file:
                # A receiver of an earlier version may have taken in what is refused today.
                _, inside = bundle.inspect(file)
                if hazards := bundle.find_hazards(file, inside):
                    raise PolicyError("the submission must not be loaded", why="\n".join(hazards))
                bundle.unpack(file, root)
            evaluation = own_word(root)
            server.bring(name, root, tuple(entries(root)))
        request = {
            "job": self.job_name(job),
            "submission": name,
            "inputs": name_there(self.name, "inputs") if self.material.inputs else "",
            "labels": name_there(self.name, "labels") if self.material.labels else "",
            "grader": name_there(self.name, "grader"),
            "predict": list(self.how.predict or PREDICT),
            "grade": list(self.how.command or ACCURACY),
            "points": self.rules.points,
            "timeout_s": self.how.timeout,
            "limits": limits_of(server),
        }
        return server.grade(request, 2 * self.how.timeout + LINK_S), evaluation

    def job_name(self, job: _Job) -> str:
        """By which the server knows again what it was asked: a lost reply runs nothing twice."""
        fresh = os.urandom(8).hex() if self.again else ""
        return f"g-{hashlib.sha256(f'{job.key}{fresh}'.encode()).hexdigest()[:32]}"

    def record(
        self, job: _Job, reply: dict[str, Any], evaluation: Evaluation | None, image: str
    ) -> Record:
        """What a reply comes to."""
        predict, judged = reply["predict"], reply["grade"]
        if predict["outcome"] != "ok":
            told = told_of(predict["outcome"], predict["code"])
            raw = failed(f"{told}, so nothing could be graded")
            return self.graded(job, "failed", raw, evaluation, image, told, predict)
        if judged["outcome"] != "ok":
            told = f"staff's grader: {told_of(judged['outcome'], judged['code'])}"
            return self.empty(job, "error", told=f"{told}\n{judged['said'][-1500:]}".strip())
        try:
            raw = parse_results(str(reply["results"]), self.rules.points)
        except ValueError as error:
            return self.empty(job, "error", told=f"staff's grader: {error}")
        return self.graded(job, "graded", raw, evaluation, image, "", predict)

    def graded(
        self,
        job: _Job,
        outcome: Outcome,
        raw: Results,
        evaluation: Evaluation | None,
        image: str,
        told: str,
        predict: dict[str, Any],
    ) -> Record:
        made = msgspec.structs.replace(
            self.empty(job, outcome, told=told),
            raw=raw,
            comparison=compared(evaluation, raw.extra_data, self.how.tolerance),
            said=bool(predict["said"]),
            image=image,
        )
        return self.timely(made, job.handed)

    def empty(self, job: _Job, outcome: Outcome, *, told: str) -> Record:
        handed = job.handed
        return Record(
            assignment=self.name,
            seat=handed.seat,
            students=handed.students,
            student=handed.student,
            number=handed.number,
            received=handed.received,
            bundle_sha256=handed.sha256,
            key=job.key,
            outcome=outcome,
            points=self.rules.points,
            late_s=handed.late_s,
            penalty=handed.penalty,
            told=told,
            at=time.time(),
        )

    def timely(self, made: Record, handed: Handed) -> Record:
        """The record with today's extensions: who gets one later is not graded again."""
        late = msgspec.structs.replace(
            made, late_s=handed.late_s, penalty=handed.penalty, students=handed.students
        )
        if made.raw is None:
            return late
        score = after_penalty(made.raw.score, made.points, handed.penalty)
        return msgspec.structs.replace(late, score=score)

    def keep(self, handed: Handed, made: Record, *, fresh: bool, said: str | None = None) -> None:
        corrected = self.shelf.put(made, fresh=fresh, said=said)
        graded = Graded(
            seat=handed.seat,
            state=made.outcome,
            record=made,
            fresh=fresh,
            why=made.told,
            corrected=corrected,
        )
        self.done[handed.seat] = graded
        self.tell(graded)

    def look_at_all(self) -> None:
        """Flags compare everybody's submissions, and are made anew each time."""
        every = self.found if self.whole else collecting.collect(self.staff.folder, self.name)
        made = {
            one.seat: found
            for one in every.here
            if (found := self.shelf.read(one.seat)) is not None
        }
        for seat, flags in flagged(self.staff.folder, every.here, made).items():
            record = msgspec.structs.replace(made[seat], flags=flags)
            if record != made[seat]:
                self.shelf.replace(record)
            if seat in self.done:
                self.done[seat] = msgspec.structs.replace(self.done[seat], record=record)

    def result(self) -> Grading:
        rest = [
            Graded(seat=one.seat, state=one.state, why=one.why)
            for one in self.found.handed
            if one.state != "in"
        ]
        order = [one.seat for one in self.found.handed]
        seats = sorted([*self.done.values(), *rest], key=lambda one: order.index(one.seat))
        return Grading(
            assignment=self.name,
            seats=tuple(seats),
            unreached=tuple(self.unreached),
            why=self.why,
        )
