"""The schema of course.yaml (`CourseFile`), and the resulting configuration (`CourseConfig`)."""

from __future__ import annotations

import ipaddress
import re
from datetime import date
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from labctl.config.document import quote
from labctl.config.locations import parse_inside, parse_template
from labctl.config.reader import Parsed
from labctl.config.scalars import (
    parse_duration,
    parse_line,
    parse_name,
    parse_port,
    parse_price,
    parse_size,
)
from labctl.config.schema import LabConfig
from labctl.config.times import (
    ANY_S,
    DEFAULT_GRACE_S,
    DEFAULT_MAX_BYTES,
    Holiday,
    Moment,
    parse_date,
    parse_free_days,
    parse_grace,
    parse_holiday,
    parse_late,
    parse_missing,
    parse_moment,
    parse_part,
    parse_penalty,
)
from labctl.lazy import lazy_imports
from labctl.model import Value

with lazy_imports(__name__):
    import zoneinfo

# Days of the week, Monday first, as `date.weekday` counts them.
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DEFAULT_PREWARM_S = 20 * 60
_EMAIL = re.compile(r"[^\s@,;<>()\"'\\]+@[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?")
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_SITE = re.compile(r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9.-]{1,253})(:[0-9]{1,5})?/?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,63}")


def parse_email(text: str) -> str:
    if len(text) > 254 or text.startswith("-") or not _EMAIL.fullmatch(text):
        raise ValueError(f"{quote(text)} is not an email address")
    return text


def parse_day_time(text: str) -> int:
    """Parse `10:00` into seconds since midnight; `24:00` is the end of the day."""
    match = re.fullmatch(r"(\d{1,2}):(\d\d)", text)
    if match is None or int(match[2]) > 59 or int(match[1]) * 60 + int(match[2]) > 24 * 60:
        raise ValueError(f'{quote(text)} is not a time of day: write "10:00"')
    return int(match[1]) * 3600 + int(match[2]) * 60


def parse_zone(text: str) -> str:
    try:
        zoneinfo.ZoneInfo(text)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(
            f"this machine has no time zone {quote(text)}: write Europe/Berlin or UTC"
        ) from None
    return text


def parse_network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError:
        raise ValueError(f"{quote(text)} is not a network: write 192.0.2.0/24") from None


def parse_host(text: str) -> str:
    if len(text) > 253 or not _HOST.fullmatch(text):
        raise ValueError(f"{quote(text)} is not a host name or address")
    return text


def validate_user_name(text: str) -> str:
    if not _USER.fullmatch(text):
        raise ValueError(f"{quote(text)} is not a user name")
    return text


def parse_points(text: str) -> float:
    if not re.fullmatch(r"\d{1,6}(\.\d{1,3})?", text) or float(text) <= 0:
        raise ValueError(f"{quote(text)} is not a number of points above 0")
    return float(text)


def parse_part_points(text: str) -> float:
    if not re.fullmatch(r"\d{1,6}(\.\d{1,3})?", text):
        raise ValueError(f"{quote(text)} is not a number of points")
    return float(text)


def parse_weight(text: str) -> float:
    if not re.fullmatch(r"\d{1,3}(\.\d{1,3})?%?", text) or not 0 < float(text.rstrip("%")) <= 100:
        raise ValueError(f"{quote(text)} is not a percentage above 0 and up to 100, such as 40%")
    return float(text.rstrip("%"))


def parse_metric(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", text):
        raise ValueError(f"{quote(text)} is not the name of a metric, such as accuracy")
    return text


def parse_measurement(text: str) -> float:
    if not re.fullmatch(r"-?\d{1,9}(\.\d{1,9})?", text):
        raise ValueError(f"{quote(text)} is not a value of the metric, such as 0.9")
    return float(text)


def parse_share(text: str) -> float:
    if not re.fullmatch(r"[01](\.\d{1,9})?", text) or float(text) > 1:
        raise ValueError(f"{quote(text)} is not a fraction from 0 to 1, such as 0.02")
    return float(text)


def parse_canvas_url(text: str) -> str:
    """Parse the address of a Canvas site. http is accepted on this machine only."""
    match = _SITE.fullmatch(text)
    if match is None:
        raise ValueError(f"{quote(text)} is not a site's address: write https://canvas.example.edu")
    if match["scheme"] == "http" and match["host"] not in ("127.0.0.1", "localhost"):
        raise ValueError(f"{quote(text)}: use https, because the token would be sent unencrypted")
    return text.rstrip("/")


def parse_canvas_id(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,17}", text):
        raise ValueError(f"{quote(text)} is not a number from an address in Canvas, such as 4711")
    return int(text)


def parse_count(text: str) -> int:
    if not re.fullmatch(r"\d{1,3}", text) or not 1 <= int(text) <= 100:
        raise ValueError(f"{quote(text)} is not a number from 1 to 100")
    return int(text)


Duration = Annotated[int, Parsed(parse_duration)]


class InstructorConfig(Value, frozen=True):
    name: str
    email: Annotated[str, Parsed(parse_email)] = ""


def parse_minutes(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise ValueError(f"{quote(text)} is not a number of minutes above 0")
    return int(text)


def parse_wall(text: str) -> int:
    """Parse the longest time of a job, which Slurm knows in minutes."""
    seconds = parse_duration(text)
    if seconds % 60:
        raise ValueError(f"{quote(text)} is not in whole minutes: write 2m or 2h")
    return seconds


def parse_machine_name(text: str) -> str:
    if len(text) > 260 or not re.fullmatch(r"[A-Za-z0-9_.:-]+", text):
        raise ValueError(f"{quote(text)} is not the name of a machine, as in server.static.hosts")
    return text


def parse_homes(text: str) -> str:
    if len(text) > 200 or not re.fullmatch(r"(/[A-Za-z0-9_.-]+)+", text) or "/.." in text:
        raise ValueError(f"{quote(text)} is not an absolute path of letters, digits, . _ and -")
    return text


class SharedConfig(Value, frozen=True):
    """Accounts on shared servers instead of a server for each student.

    With `engine: broker` an account leases at most `gpus` GPUs at once, each for `gpu_lease`
    seconds. With `engine: slurm` all accounts are on one server, and each run is a job of Slurm: an
    account uses at most `gpus` GPUs at once, each job for at most `wall` seconds, and `gpu_minutes`
    in all. None has no limit. With `controller`, the name of a machine, all machines of the
    provider are one cluster of Slurm, and the accounts' homes are in `homes`, which they share.
    """

    engine: Literal["broker", "slurm"] = "broker"
    accounts_per_server: Annotated[int, Parsed(parse_count)] = 8
    gpus: Annotated[int, Parsed(parse_count)] = 1
    gpu_lease: Duration = 4 * 3600
    gpu_minutes: Annotated[int | None, Parsed(parse_minutes)] = None
    wall: Annotated[int | None, Parsed(parse_wall)] = None
    controller: Annotated[str, Parsed(parse_machine_name)] = ""
    homes: Annotated[str, Parsed(parse_homes)] = "/home"

    @property
    def has_queue(self) -> bool:
        """Whether Slurm decides whose run is next."""
        return self.engine == "slurm"

    def count_servers(self, seats: int) -> int:
        """Return how many servers this many seats need."""
        return min(1, seats) if self.has_queue else -(-seats // self.accounts_per_server)

    def count_accounts(self, seats: int) -> int:
        """Return how many accounts a server has."""
        return seats if self.has_queue else self.accounts_per_server


# Keys of `shared` that only one of the engines has
ENGINE_KEYS = {
    "broker": ("accounts_per_server", "gpu_lease"),
    "slurm": ("controller", "gpu_minutes", "homes", "wall"),
}


class PerStudent(Value, frozen=True):
    """The limits of each seat. `budget` is dollars for the whole course; seconds, `disk` bytes."""

    budget: Annotated[float | None, Parsed(parse_price)] = None
    ttl: Duration = 8 * 3600
    max_ttl: Duration = 12 * 3600
    disk: Annotated[int, Parsed(parse_size)] = 0


class ClassHours(Value, frozen=True):
    """Hours of the week, by the clocks of `zone`.

    `begins` and `ends` are seconds since midnight; servers are created `prewarm` seconds earlier.
    """

    days: tuple[Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"], ...]
    begins: Annotated[int, Parsed(parse_day_time)] = msgspec.field(name="from")
    ends: Annotated[int, Parsed(parse_day_time)] = msgspec.field(name="to")
    zone: Annotated[str, Parsed(parse_zone)]
    prewarm: Duration = DEFAULT_PREWARM_S

    def __post_init__(self) -> None:
        if self.ends <= self.begins:
            raise ValueError("`to` is not after `from`; split hours past midnight in two entries")
        if not self.days or len(set(self.days)) < len(self.days):
            raise ValueError("days: name at least one day, and each only once")


class Term(Value, frozen=True):
    """First and last day of the course."""

    first: Annotated[date, Parsed(parse_date)] = msgspec.field(name="from")
    last: Annotated[date, Parsed(parse_date)] = msgspec.field(name="to")

    def __post_init__(self) -> None:
        if self.last < self.first:
            raise ValueError("`to` is before `from`")


class KeeperConfig(Value, frozen=True):
    """The SSH address at which students reach the keeper."""

    host: Annotated[str, Parsed(parse_host)]
    user: Annotated[str, Parsed(validate_user_name)] = "labctl"
    port: Annotated[int, Parsed(parse_port)] = 22


class CanvasConfig(Value, frozen=True):
    """The course in Canvas: its number, and that of each assignment, at the site `url`."""

    url: Annotated[str, Parsed(parse_canvas_url)]
    course: Annotated[int, Parsed(parse_canvas_id)]
    assignments: dict[
        Annotated[str, Parsed(parse_name)], Annotated[int, Parsed(parse_canvas_id)]
    ] = msgspec.field(default_factory=dict)


class GradeConfig(Value, frozen=True):
    """How one assignment is graded.

    `predict` runs the submission, in a container without the labels; `command` is the staff's
    grading command, in a container with them; () means labctl's own. `inputs` and `labels` are
    paths below the folder. `timeout` in seconds, for each container. `tolerance` is the
    allowed difference between a student's claimed result and the measured one. `reference` is the
    directory, below the folder, of the staff's own solution with code/ and model/; "" for none.

    `points` is what the grading command gives at most; None means what the tests leave. `scale`
    maps values of `metric`, a key of the grader's `extra_data`, to points; between two values it is
    linear, outside of them flat. `autograder` is a directory or zip in Gradescope's form, below the
    folder, which replaces both commands; "" for none.
    """

    predict: Annotated[tuple[str, ...], Parsed(parse_line)] | tuple[str, ...] = ()
    command: Annotated[tuple[str, ...], Parsed(parse_line)] | tuple[str, ...] = ()
    inputs: Annotated[str, Parsed(parse_inside)] = ""
    labels: Annotated[str, Parsed(parse_inside)] = ""
    timeout: Duration = 600
    tolerance: Annotated[float, Parsed(parse_share)] = 0.02
    reference: Annotated[str, Parsed(parse_inside)] = ""
    metric: Annotated[str, Parsed(parse_metric)] = ""
    points: Annotated[float | None, Parsed(parse_points)] = None
    scale: dict[
        Annotated[float, Parsed(parse_measurement)], Annotated[float, Parsed(parse_part_points)]
    ] = msgspec.field(default_factory=dict)
    autograder: Annotated[str, Parsed(parse_inside)] = ""

    def __post_init__(self) -> None:
        if self.scale and len(self.scale) < 2:
            raise ValueError("scale: give at least two values of the metric with their points")
        most = max(self.scale.values(), default=0.0)
        if self.scale and self.points is not None and most != self.points:
            raise ValueError(f"scale gives {most:g} points at most, and points is {self.points:g}")
        if self.scale and not most:
            raise ValueError("scale gives no points")
        if self.autograder and (self.has_commands or self.metric or self.scale):
            raise ValueError(
                "an autograder cannot be combined with predict, command, inputs, labels, metric "
                "or scale: it gives the points itself"
            )

    @property
    def has_commands(self) -> bool:
        """Whether a key says what the two commands are, or what they get."""
        return bool(self.predict or self.command or self.inputs or self.labels)

    @property
    def metric_name(self) -> str:
        """The metric that gives points; "" if the grader's score does."""
        return self.metric or ("accuracy" if self.scale else "")


class TestsConfig(Value, frozen=True):
    """Directories, below the folder, of pytest files; "" for none.

    Students get the `public` ones. The `hidden` ones only grade.
    """

    public: Annotated[str, Parsed(parse_inside)] = ""
    hidden: Annotated[str, Parsed(parse_inside)] = ""


class LateRules(Value, frozen=True):
    """`late` as a mapping: percent off for each day or part of a day.

    Work is accepted until `at_most` seconds late. `free_days` are the late days without a
    penalty that a student has over the term.
    """

    per_day: Annotated[int, Parsed(parse_penalty)] = 0
    at_most: Annotated[int, Parsed(parse_late)] = ANY_S
    free_days: Annotated[int, Parsed(parse_free_days)] = 0


class AssignmentConfig(Value, frozen=True):
    """One assignment; its rules for time and size are those of the assignment's own file.

    `late` in seconds (or times.ANY_S), `penalty` in percent for each day or part of a day. A
    submission at most `grace` seconds after the due time is on time. `template` says
    where the files come from that students start with: a template of labctl, a directory below the
    folder, or a git address with a commit; "" for none. `points` is the total; people give those of
    `rubric`, item by item, and the automatic grading gives `graded_points`.
    """

    template: Annotated[str, Parsed(parse_template)] = ""
    tests: TestsConfig = TestsConfig()
    due: Annotated[Moment | None, Parsed(parse_moment)] = None
    late_rule: Annotated[int, Parsed(parse_late)] | LateRules = msgspec.field(
        default=0, name="late"
    )
    penalty_percent: Annotated[int, Parsed(parse_penalty)] = msgspec.field(
        default=0, name="penalty"
    )
    grace: Annotated[int, Parsed(parse_grace)] = DEFAULT_GRACE_S
    max_size: Annotated[int, Parsed(parse_size)] = DEFAULT_MAX_BYTES
    require: tuple[Annotated[str, Parsed(parse_part)], ...] = ("model",)
    points: Annotated[float, Parsed(parse_points)] = 100.0
    grade: GradeConfig | None = None
    rubric: dict[Annotated[str, Parsed(parse_name)], Annotated[float, Parsed(parse_points)]] = (
        msgspec.field(default_factory=dict)
    )
    missing: Annotated[str, Parsed(parse_missing)] = ""

    @property
    def late(self) -> int:
        rule = self.late_rule
        return rule.at_most if isinstance(rule, LateRules) else rule

    @property
    def penalty(self) -> int:
        rule = self.late_rule
        return rule.per_day if isinstance(rule, LateRules) else self.penalty_percent

    @property
    def free_days(self) -> int:
        return self.late_rule.free_days if isinstance(self.late_rule, LateRules) else 0

    @property
    def hands_out_files(self) -> bool:
        return bool(self.template or self.tests.public)

    @property
    def graded_points(self) -> float:
        """What tests and the grading command are worth: the points that are not in the rubric."""
        return round(self.points - sum(self.rubric.values()), 3)


class AssignmentGroup(Value, frozen=True):
    """Assignments with rules for totals, as in Canvas.

    The `drop_lowest` lowest grades of each student do not count. `weight` is the group's percent of
    the total; 0 if points add up.
    """

    assignments: tuple[Annotated[str, Parsed(parse_name)], ...]
    drop_lowest: Annotated[int, Parsed(parse_count)] = 0
    weight: Annotated[float, Parsed(parse_weight)] = 0.0

    def __post_init__(self) -> None:
        if not self.drop_lowest and not self.weight:
            raise ValueError("a group needs `drop_lowest`, `weight`, or both")
        if len(set(self.assignments)) < len(self.assignments):
            raise ValueError("assignments: name each only once")
        if self.drop_lowest >= len(self.assignments):
            raise ValueError(
                f"drop_lowest is {self.drop_lowest} and the group has "
                f"{len(self.assignments)} assignments, so no grade would count"
            )


class CourseFile(Value, frozen=True):
    """Every key of course.yaml that lab.yaml does not have."""

    course: Annotated[str, Parsed(parse_name)]
    instructor: InstructorConfig | None = None
    shared: SharedConfig | None = None
    per_student: PerStudent = PerStudent()
    hours: tuple[ClassHours, ...] = ()
    term: Term | None = None
    holidays: tuple[Annotated[Holiday, Parsed(parse_holiday)], ...] = ()
    missing: Annotated[str, Parsed(parse_missing)] = ""
    ssh_from: tuple[Annotated[str, Parsed(parse_network)], ...] = ()
    keeper: KeeperConfig | None = None
    grading: object = None
    canvas: CanvasConfig | None = None
    assignments: dict[Annotated[str, Parsed(parse_name)], AssignmentConfig] = msgspec.field(
        default_factory=dict
    )
    assignment_groups: dict[Annotated[str, Parsed(parse_name)], AssignmentGroup] = msgspec.field(
        default_factory=dict
    )


class GradingConfig(Value, frozen=True):
    """The lab in which submissions are graded: its server, image and limits."""

    lab: LabConfig


class CourseConfig(Value, frozen=True):
    """The configuration of a course. `lab` is every seat's lab, apart from its name and limits.

    `lab.server.need` has the budget, TTL and longest TTL of `per_student`. `root` is the folder;
    paths in `lab` are absolute, those of assignments relative to `root`.
    """

    name: str
    root: Path
    path: Path
    file_hash: str
    lab: LabConfig
    instructor: InstructorConfig | None = None
    shared: SharedConfig | None = None
    per_student: PerStudent = PerStudent()
    hours: tuple[ClassHours, ...] = ()
    term: Term | None = None
    holidays: tuple[Holiday, ...] = ()
    missing: str = ""
    ssh_from: tuple[str, ...] = ()
    store: str = ""
    keeper: KeeperConfig | None = None
    grading: GradingConfig | None = None
    canvas: CanvasConfig | None = None
    assignments: dict[str, AssignmentConfig] = msgspec.field(default_factory=dict)
    assignment_groups: dict[str, AssignmentGroup] = msgspec.field(default_factory=dict)

    def is_missing_zero(self, assignment: str) -> bool:
        """Tell whether a missing submission of this assignment counts as 0 points."""
        return (self.assignments[assignment].missing or self.missing) == "0"

    @property
    def image_reference(self) -> str:
        """The image that course.yaml names; "" if it names none, or one that servers build."""
        return self.lab.image.reference if self.lab.has_own_image else ""
