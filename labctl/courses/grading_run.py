"""Grading an assignment: every submission that counts, each in two containers.

A failure does not stop the others. Repeating the grading continues it: a grade from the same
submission, data, grader and image is kept, and only its lateness is computed again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from labctl.courses import collect as collecting
from labctl.courses.collect import Collection, SeatSubmission
from labctl.courses.evidence import flag_submissions
from labctl.courses.grade_store import GradeStore
from labctl.courses.grades import record_released_scores
from labctl.courses.grading.claims import compare_evaluation
from labctl.courses.grading.combine import PartResult, ProgramOutput, read_output, read_results
from labctl.courses.grading.outcome import find_common_failure, withhold_grade
from labctl.courses.grading.record import GradeRecord, Outcome
from labctl.courses.grading.results import subtract_penalty
from labctl.courses.grading_material import (
    list_bundle_files,
    read_own_evaluation,
    upload_material,
)
from labctl.courses.grading_request import (
    GradingPlan,
    encode_grade_rules,
    find_grading,
    grade_submission,
    make_grading_plan,
)
from labctl.courses.grading_server import (
    GradingImage,
    GradingServer,
    end_forgotten,
    find_grading_image,
    open_grading_server,
)
from labctl.courses.records.folder import Seat
from labctl.courses.servers import CourseOperator
from labctl.errors import ConnectError, InterruptError, LabError, PolicyError
from labctl.model import Value
from labctl.runs.evaluation import Evaluation
from labctl.submissions import bundle
from labctl.text import count_text


class SeatGrade(Value, frozen=True):
    """The grade of one seat.

    `state` is the outcome of its GradeRecord, or why it has no submission. `fresh` is True
    if it was graded now. `corrected` names the owners whose results.json was edited by hand and
    therefore left alone.
    """

    seat: str
    state: str
    record: GradeRecord | None = None
    fresh: bool = False
    why: str = ""
    corrected: tuple[str, ...] = ()


class GradingResult(Value, frozen=True):
    """The grades of an assignment. `unreached` seats were not graded: the server was lost.

    `withheld` says how every submission failed alike, so that none got a grade; "" otherwise.
    """

    assignment: str
    seats: tuple[SeatGrade, ...]
    unreached: tuple[str, ...] = ()
    why: str = ""
    withheld: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether every submission that counts has a grade."""
        return not self.unreached and all(seat.state != "error" for seat in self.seats)


class _Job(Value, frozen=True):
    """A submission to grade, and the hash of everything that its grade depends on."""

    handed: SeatSubmission
    key: str


def grade_assignment(
    staff: CourseOperator,
    name: str,
    seats: Sequence[Seat] = (),
    *,
    again: bool = False,
    keep: bool = False,
    at_once: int = 1,
    accept_failures: bool = False,
    profile: str = "",
    on_result: Callable[[SeatGrade], None] = lambda graded: None,
) -> GradingResult:
    """Grade the submissions of these seats, by default all; call `on_result` with each grade.

    No server is created if there is nothing to run. If every submission fails alike, none gets a
    grade, unless staff accept the failures. PolicyError if students' code must not run on the
    configured grading server.
    """
    find_grading(staff.folder, name)
    collection = collecting.collect(staff.folder, name, seats, profile=profile, by=staff.by)
    plan = make_grading_plan(staff, name)
    batch = _Batch(staff, plan, collection, on_result, again=again, all_seats=not seats)
    # A second grading would clear the server while this one uses it.
    with staff.state.lock(f"{staff.folder.id}-grade", f"course grade {name}", wait_s=0.5):
        record_released_scores(staff.folder, name, staff.by)
        batch.run(keep, at_once)
        if not accept_failures:
            batch.withhold_common_failure()
        batch.update_flags()
    return batch.result()


def _is_current(stored: GradeRecord, key: str, image: GradingImage) -> bool:
    """Return whether a grade still holds: nothing that it depends on has changed since."""
    is_same = stored.key == key and not image.replaces(stored.image, stored.image_content)
    return is_same and stored.outcome != "error"


class _Batch:
    """One grading of an assignment's submissions."""

    def __init__(
        self,
        staff: CourseOperator,
        plan: GradingPlan,
        collection: Collection,
        notify: Callable[[SeatGrade], None],
        *,
        again: bool,
        all_seats: bool,
    ) -> None:
        self.staff = staff
        self.name = plan.name
        self.plan = plan
        self.rules = plan.rules
        self.collection = collection
        self.again = again
        self.all_seats = all_seats
        self.stopped = False
        self.notify = notify
        self.grade_store = GradeStore(staff.folder, plan.name, staff.by)
        self.done: dict[str, SeatGrade] = {}
        self.unreached: list[str] = []
        self.why = ""
        self.withheld = ""

    def run(self, keep: bool, at_once: int) -> None:
        jobs = []
        image = find_grading_image(self.staff)
        for handed in self.collection.accepted:
            job = _Job(handed=handed, key=self.job_key(handed))
            stored = self.grade_store.read_record(handed.seat)
            if stored and not self.again and _is_current(stored, job.key, image):
                self.store_grade(handed, self.with_lateness(stored, handed), fresh=False)
            else:
                jobs.append(job)
        if jobs:
            with open_grading_server(self.staff, keep=keep) as server:
                server.prepare_image()
                upload_material(server, self.name, self.plan.material)
                self.grade_all(server, jobs, 1 if server.gpu_setting() else at_once)
        elif not keep:
            end_forgotten(self.staff)

    def grade_all(self, server: GradingServer, jobs: Sequence[_Job], at_once: int) -> None:
        threads = ThreadPoolExecutor(at_once, thread_name_prefix="labctl-grade")
        try:
            for _ in threads.map(lambda job: self.grade_one(server, job), jobs):
                pass
        except KeyboardInterrupt:
            self.stopped = True
            raise InterruptError(
                "grading was interrupted",
                why=f"graded so far: {count_text(len(self.done), 'submission')}; these grades stay",
                hint=f"labctl course grade {self.name}   # continues",
            ) from None
        finally:
            # Containers that still run end when the server is cleared.
            threads.shutdown(wait=not self.stopped, cancel_futures=True)

    def job_key(self, handed: SeatSubmission) -> str:
        """Return the hash of everything that the grade depends on."""
        grading = self.staff.folder.config.grading
        parts = [
            handed.sha256,
            encode_grade_rules(self.plan.config),
            repr(grading.lab.limits if grading else ""),
            repr(grading.lab.image if grading else ""),
            f"{self.rules.graded_points}",
            *self.plan.material.hash_lines(),
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def grade_one(self, server: GradingServer, job: _Job) -> None:
        """Grade one submission; an error with it is recorded and stops no other."""
        if self.unreached and not self.stopped:
            self.unreached.append(job.handed.seat)
            return
        started_at = time.monotonic()
        results: tuple[PartResult, ...] = ()
        try:
            results, evaluation = self.send_job(server, job)
            record = self.build_record(job, results, evaluation, server)
        except ConnectError as error:
            self.unreached.append(job.handed.seat)
            self.why = ": ".join(filter(None, [error.what, error.why]))
            return
        except (LabError, OSError) as error:
            message = error.what if isinstance(error, LabError) else str(error)
            why = error.why if isinstance(error, LabError) else ""
            record = self.empty_record(job, "error", reason=" ".join(filter(None, [message, why])))
        if self.stopped:
            return
        record = msgspec.structs.replace(record, seconds=round(time.monotonic() - started_at, 3))
        self.store_grade(job.handed, record, fresh=True, output=read_output(results))

    def send_job(
        self, server: GradingServer, job: _Job
    ) -> tuple[tuple[PartResult, ...], Evaluation | None]:
        """Run a submission; return its results and the evaluation in the submission."""
        private = self.staff.folder.private / "grading"
        private.mkdir(mode=0o700, exist_ok=True)
        name = f"sub-{job.handed.sha256[:32]}"
        with tempfile.TemporaryDirectory(dir=private) as directory:
            root = Path(directory) / "bundle"
            with Path(job.handed.bundle).open("rb") as file:
                # An earlier version's receiver may have accepted what is refused today.
                _, members = bundle.inspect(file)
                if hazards := bundle.find_hazards(file, members):
                    raise PolicyError("the submission must not be loaded", why="\n".join(hazards))
                bundle.unpack(file, root)
            evaluation = read_own_evaluation(root)
            server.upload(name, root, tuple(list_bundle_files(root)))
        job_name = self.job_name(job, server)
        return grade_submission(server, self.plan, job_name, name), evaluation

    def job_name(self, job: _Job, server: GradingServer) -> str:
        """Return the name by which the server recognizes a repeated request."""
        fresh = os.urandom(8).hex() if self.again else ""
        parts = (job.key, fresh, server.image, server.image_content)
        return f"g-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:32]}"

    def build_record(
        self,
        job: _Job,
        results: Sequence[PartResult],
        evaluation: Evaluation | None,
        server: GradingServer,
    ) -> GradeRecord:
        """Build the record of a grade from the server's results."""
        outcome = read_results(results, self.plan.config)
        if outcome.raw is None:
            return self.empty_record(job, "error", reason=outcome.message)
        record = msgspec.structs.replace(
            self.empty_record(job, outcome.state, reason=outcome.message),
            raw=outcome.raw,
            comparison=compare_evaluation(evaluation, outcome.raw, self.plan.config.tolerance),
            has_output=bool(read_output(results).printed),
            image=server.image,
            image_content=server.image_content,
        )
        return self.with_lateness(record, job.handed)

    def empty_record(self, job: _Job, outcome: Outcome, *, reason: str) -> GradeRecord:
        handed = job.handed
        return GradeRecord(
            assignment=self.name,
            seat=handed.seat,
            students=handed.students,
            student=handed.student,
            number=handed.number,
            received=handed.received,
            bundle_sha256=handed.sha256,
            key=job.key,
            outcome=outcome,
            points=self.rules.graded_points,
            late_s=handed.late_s,
            penalty=handed.penalty,
            free_days=handed.free_days,
            message=reason,
            at=time.time(),
        )

    def with_lateness(self, record: GradeRecord, handed: SeatSubmission) -> GradeRecord:
        """Return the record with the extensions of now: a new extension needs no new grading."""
        updated = msgspec.structs.replace(
            record,
            late_s=handed.late_s,
            penalty=handed.penalty,
            free_days=handed.free_days,
            students=handed.students,
        )
        if record.raw is None:
            return updated
        score = subtract_penalty(record.raw.score, record.points, handed.penalty)
        return msgspec.structs.replace(updated, score=score)

    def store_grade(
        self,
        handed: SeatSubmission,
        record: GradeRecord,
        *,
        fresh: bool,
        output: ProgramOutput | None = None,
    ) -> None:
        corrected = self.grade_store.store_grade(record, fresh=fresh, output=output)
        graded = SeatGrade(
            seat=handed.seat,
            state=record.outcome,
            record=record,
            fresh=fresh,
            why=record.message,
            corrected=corrected,
        )
        self.done[handed.seat] = graded
        self.notify(graded)

    def withhold_common_failure(self) -> None:
        """Take back this grading's grades if all submissions failed alike: the image may do it."""
        if not any(graded.fresh for graded in self.done.values()):
            return
        records = {seat: graded.record for seat, graded in self.done.items() if graded.record}
        self.withheld = find_common_failure(list(records.values()))
        if not self.withheld:
            return
        message = f"withheld, as every submission failed alike: {self.withheld}"
        for handed in self.collection.accepted:
            if (record := records.get(handed.seat)) is not None:
                self.store_grade(handed, withhold_grade(record, message), fresh=True)

    def update_flags(self) -> None:
        """Compare all submissions anew and store the flags of each."""
        every = (
            self.collection if self.all_seats else collecting.collect(self.staff.folder, self.name)
        )
        records = {
            submission.seat: record
            for submission in every.accepted
            if (record := self.grade_store.read_record(submission.seat)) is not None
        }
        templates = self.staff.paths.data_dir / "templates"
        all_flags = flag_submissions(self.staff.folder, every.accepted, records, templates)
        for seat, flags in all_flags.items():
            updated = msgspec.structs.replace(records[seat], flags=flags)
            if updated != records[seat]:
                self.grade_store.replace_record(updated)
            if seat in self.done:
                self.done[seat] = msgspec.structs.replace(self.done[seat], record=updated)

    def result(self) -> GradingResult:
        others = [
            SeatGrade(seat=submission.seat, state=submission.state, why=submission.why)
            for submission in self.collection.submissions
            if submission.state != "in"
        ]
        order = [submission.seat for submission in self.collection.submissions]
        seats = sorted([*self.done.values(), *others], key=lambda graded: order.index(graded.seat))
        return GradingResult(
            assignment=self.name,
            seats=tuple(seats),
            unreached=tuple(self.unreached),
            why=self.why,
            withheld=self.withheld,
        )
