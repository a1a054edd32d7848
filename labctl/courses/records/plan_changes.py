"""The changes of course.yaml since the last plan, and cautions about it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from labctl.config import CourseConfig, format_duration
from labctl.config.course_schema import AssignmentConfig, AssignmentGroup
from labctl.config.document import parse
from labctl.config.layers import iterate_leaves
from labctl.config.reader import as_plain
from labctl.config.schema import DEFAULT_IMAGE
from labctl.config.times import ANY_S, local_time_text
from labctl.courses.records import timetable
from labctl.model import Value
from labctl.text import count_text, dollars_text, duration_text, list_text


class PlanSnapshot(Value, frozen=True):
    """The last plan shown: every key of course.yaml as text, and the seats at that time."""

    version: int = 1
    at: float = 0.0
    by: str = ""
    keys: dict[str, str] = msgspec.field(default_factory=dict)
    seats: tuple[str, ...] = ()


class KeyChange(Value, frozen=True):
    """A change of one dotted key; "" means that the key is absent."""

    key: str
    before: str
    after: str


def read_keys(data: bytes) -> dict[str, str]:
    """Return every key of a course.yaml that has a value, as text."""
    node = parse(data, "", [])
    if node is None:
        return {}
    keys = {}
    for key, leaf in iterate_leaves(node):
        value = as_plain(leaf)
        keys[key] = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return keys


def list_changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[KeyChange]:
    """Return the changes in the order of the present file; removed keys come last."""
    return [
        KeyChange(key=key, before=_space(before.get(key, "")), after=_space(after.get(key, "")))
        for key in dict.fromkeys([*after, *before])
        if before.get(key, "") != after.get(key, "")
    ]


def _space(value: str) -> str:
    """Return a value with spaces between the items of a list, so that a line can break there."""
    try:
        return msgspec.json.format(value, indent=0) if value[:1] in ("[", "{") else value
    except msgspec.DecodeError:  # a text that begins like a list
        return value


def describe_queue(config: CourseConfig) -> str:
    """Say what Slurm gives each account; "" for a course whose engine is not Slurm."""
    shared = config.shared
    if shared is None or not shared.has_queue:
        return ""
    parts = [f"{count_text(shared.gpus, 'GPU')} at a time"]
    if shared.wall is not None:
        parts.append(f"jobs of at most {format_duration(shared.wall)}")
    if shared.gpu_minutes is not None:
        parts.append(f"{shared.gpu_minutes:,} GPU minutes in all")
    return f"Slurm gives each account {', '.join(parts)}"


# what students get if course.yaml names no image, and what to do about it
IMAGE_CAUTION = f"labs that name none get {DEFAULT_IMAGE}, which has no packages"
IMAGE_NEXT = "name your image in course.yaml: image: REFERENCE"


def list_cautions(config: CourseConfig, now: float, own_images: Collection[str] = ()) -> list[str]:
    """List settings that are allowed, but perhaps not intended.

    `own_images` are the assignments that hand out an image of their own.
    """
    messages = []
    limits = config.per_student
    if limits.budget is None:
        messages.append("no per_student.budget: no spending limit ends a server")
    if config.hours and config.keeper is None:
        messages.append(
            "class hours without a keeper: they only apply while `labctl course serve` runs"
        )
    if config.hours and config.term is None:
        messages.append("class hours without a term: they never stop, and there is no forecast")
    has_queue = config.shared is not None and config.shared.has_queue
    if not config.store and not has_queue:
        messages.append("no store: results and the ledger are only on this machine and the servers")
    without = [name for name in config.assignments if name not in own_images]
    if (
        config.lab.uses_containers
        and config.lab.image.reference == DEFAULT_IMAGE
        and not config.lab.has_own_image
        and (without or not config.assignments)
    ):
        which = f"no image for {', '.join(without)}" if own_images else "no image"
        messages.append(f"{which}: {IMAGE_CAUTION}; {IMAGE_NEXT}")
    messages += _image_cautions(config)
    if config.lab.server.need.idle_s is None and not has_queue:
        messages.append("no server.idle: an idle server runs until its ttl")
    server = config.lab.server
    if config.shared and server.on_this_machine:
        messages.append(
            f"shared servers with provider {server.provider} are containers on this machine, "
            "for trials only"
        )
    if config.grading and config.grading.lab.server.on_this_machine:
        messages.append(
            f"the grading server's provider is {config.grading.lab.server.provider}, which cannot "
            "grade submissions; choose another one under grading.server"
        )
    return [*messages, *_assignment_cautions(config, now)]


def _image_cautions(config: CourseConfig) -> Iterable[str]:
    """Yield which labs of students do not get the image that servers build for course.yaml."""
    image = config.lab.image
    if not (config.lab.uses_containers and image.is_built and config.lab.has_own_image):
        return
    if image.build == ".":
        yield (
            "labs of students do not get the image: its Dockerfile is beside the roster; move it "
            "to a directory of its own, and write image: {build: DIRECTORY}"
        )
        return
    without = [name for name, rules in config.assignments.items() if not rules.hands_out_files]
    where = ", ".join([*without, "the course's own lab"])
    yield (
        f"no image for {where}: only labs of assignments with files get an image that servers "
        "build; to give it to all, push it to a registry and name it"
    )


def _assignment_cautions(config: CourseConfig, now: float) -> Iterable[str]:
    zone = config.hours[0].zone if config.hours else "UTC"
    for name, rules in config.assignments.items():
        if rules.due is None:
            yield f"{name} has no due time: submissions are accepted forever"
            continue
        if rules.due.at < now:
            due = local_time_text(rules.due.at, timetable.find_zone(config))
            yield f"{name} was due on {due}"
        if config.term and not (
            timetable.term_start(config.term, zone)
            <= rules.due.at
            <= timetable.term_end(config.term, zone)
        ):
            yield f"{name} is due outside the term"
        if any(begin <= rules.due.at < end for begin, end in timetable.list_pauses(config)):
            yield f"{name} is due on a holiday"
        if rules.rubric and rules.graded_points and not (rules.grade or rules.tests.hidden):
            yield (
                f"{name}: {rules.graded_points:g} of its {rules.points:g} points are not in the "
                f"rubric, and it has no `grade:`; set points: {sum(rules.rubric.values()):g}"
            )
        if (rules.grade or rules.tests.hidden) and not config.grading:
            key = "grade" if rules.grade else "tests.hidden"
            yield f"{name} has `{key}:`, but there is no `grading:` server to run it on"


def describe_assignments(config: CourseConfig) -> list[str]:
    """Describe when each assignment is due, in the course's zone, and what is dropped."""
    zone = timetable.find_zone(config)
    dues = [
        f"{name}: due {local_time_text(rules.due.at, zone)}; {_describe_late_rule(rules)}"
        for name, rules in config.assignments.items()
        if rules.due is not None
    ]
    return [*dues, *(_describe_group(*item) for item in config.assignment_groups.items())]


def _describe_group(name: str, group: AssignmentGroup) -> str:
    parts = [f"{group.weight:g}% of the total"] if group.weight else []
    if group.drop_lowest:
        one = group.drop_lowest == 1
        lowest = "the lowest grade" if one else f"the {group.drop_lowest} lowest grades"
        names = list_text(group.assignments)
        parts.append(f"{lowest} of {names} {'is' if one else 'are'} dropped")
    elif group.weight:
        parts[0] += f" for {list_text(group.assignments)}"
    return f"{name}: {'; '.join(parts)}"


def _describe_late_rule(rules: AssignmentConfig) -> str:
    parts = [grace_text(rules.grace)] if rules.grace else []
    late = {0: "later is not accepted", ANY_S: "later is always accepted"}
    text = late.get(rules.late) or f"accepted for {duration_text(rules.late)}"
    parts.append(text + (f", -{rules.penalty}% a day" if rules.late and rules.penalty else ""))
    parts += (
        [f"{count_text(rules.free_days, 'free late day')} over the term"] if rules.free_days else []
    )
    return "; ".join(parts)


def grace_text(grace_s: int) -> str:
    return f"grace period {duration_text(grace_s)}"


def describe_server_limits(config: CourseConfig) -> str:
    """Describe what ends a server."""
    limits, idle_s = config.per_student, config.lab.server.need.idle_s
    parts = [f"after {duration_text(limits.ttl)} ({duration_text(limits.max_ttl)} with `extend`)"]
    parts += [f"after {duration_text(idle_s)} without work"] if idle_s else []
    parts += [f"at {dollars_text(limits.budget)}"] if limits.budget is not None else []
    return list_text(parts, "or")


def describe_removed_machine(name: str) -> str:
    """Describe a machine of the cluster that course.yaml no longer has."""
    return (
        f"{name} is in the cluster and no longer in hosts: labctl course up drains it, and takes "
        "it out when no jobs run there"
    )
