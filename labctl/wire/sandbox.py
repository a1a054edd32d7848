"""Messages about programs in a sandbox: evaluations, and the grading of submissions."""

from typing import Dict, NamedTuple, Optional, Tuple

from .verbs import LabRequest, Verb


class EvaluateRequest(NamedTuple):
    """Evaluate `checkpoint`, a path below the run or "" for all of its checkpoints.

    `gpus` is "" (no GPU), "all" or device UUIDs joined by commas. `deadline_s` 0 is one hour.
    `program` is the text of the lab's evaluate.py, for a run whose code has none; "" if the lab has
    none either.
    """

    lab: str
    lab_id: str
    run: str
    checkpoint: str = ""
    gpus: str = ""
    deadline_s: float = 0.0
    program: str = ""


class EvaluateReply(NamedTuple):
    """The exit code of the program, and its last lines of output as `said`.

    `evaluation` is the JSON value that it wrote, null if it wrote none, and `last_line` the last
    line of its standard output. `code` is null if nothing was run: the image `missing` is not on
    the server, or the run `lacks` an evaluate.py ("program") or "checkpoints". `used_program` says
    that the request's program ran, because the run's code has none. `checkpoint_fingerprints` are
    of the run's checkpoints when it began (wire/checkpoints.py).
    """

    code: Optional[int] = None
    said: str = ""
    evaluation: object = None
    missing: str = ""
    last_line: str = ""
    lacks: str = ""
    used_program: bool = False
    checkpoint_fingerprints: Dict[str, str] = {}


class CheckRequest(NamedTuple):
    """Run pytest on `tests`, paths below the lab's pushed code, in the image of `run`.

    `gpus` and `deadline_s` are as in EvaluateRequest.
    """

    lab: str
    lab_id: str
    run: str
    tests: Tuple[str, ...]
    gpus: str = ""
    deadline_s: float = 0.0


class CheckReply(NamedTuple):
    """The exit code of pytest, its last lines of output as `said`, and its JUnit XML file.

    `results` is "" if it wrote none. `code` is null if nothing was run, because the image `missing`
    is not on the server.
    """

    code: Optional[int] = None
    said: str = ""
    results: str = ""
    missing: str = ""


class SandboxLimits(NamedTuple):
    """The limits of one sandbox. `gpus` is as in EvaluateRequest."""

    memory_bytes: int
    cpus: float
    pids: int
    disk_bytes: int
    shm_bytes: int
    gpus: str = ""


class GradeRequest(NamedTuple):
    """Run one submission, and grade its predictions.

    `submission`, `inputs`, `labels`, `grader` and `staff_files` name pushed directories, "" for
    none. `staff_files` are those that the student's container gets. `predict` and `grade` are argv;
    `timeout_s` and `limits` apply to each. With `grade` (), `predict` writes the results itself.
    Until the grading is cleared, the same `job` gets the same reply without running anything.
    """

    lab: str
    lab_id: str
    image: str
    job: str
    submission: str
    inputs: str
    labels: str
    grader: str
    predict: Tuple[str, ...]
    grade: Tuple[str, ...]
    points: float
    timeout_s: float
    limits: SandboxLimits
    staff_files: str = ""


class ProgramResult(NamedTuple):
    """How a program in a sandbox ended; `said` is the beginning and the end of its output.

    `outcome`: ok, exit, time, memory, large (its file), none (no file).
    """

    outcome: str
    code: int
    said: str
    seconds: float


class GradedJobRecord(NamedTuple):
    """The stored result of a job. `grade` is null if `predict` failed, or was the only program.

    `results` is the text that the last program wrote, null if it failed.
    """

    predict: ProgramResult
    grade: Optional[ProgramResult] = None
    results: Optional[str] = None


class GradeReply(NamedTuple):
    """A GradedJobRecord; only `missing`, the image, if it is not on the server."""

    predict: Optional[ProgramResult] = None
    grade: Optional[ProgramResult] = None
    results: Optional[str] = None
    missing: str = ""


class GradingCheckReply(NamedTuple):
    """What may forbid to run submissions on a machine.

    `machine` changes with the machine and its boot. `credentials` describes each that it holds.
    """

    machine: str
    credentials: Tuple[str, ...]


class ClearGradingReply(NamedTuple):
    cleared: bool


EVALUATE = Verb("evaluate", EvaluateRequest, EvaluateReply)
CHECK = Verb("check", CheckRequest, CheckReply)
GRADE = Verb("grade", GradeRequest, GradeReply)
CHECK_GRADING = Verb("grade-check", LabRequest, GradingCheckReply)
CLEAR_GRADING = Verb("grade-clear", LabRequest, ClearGradingReply)
