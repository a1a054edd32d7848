"""course.yaml: everything wrong with it at once, and docs/course.yaml is its reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pytest

from labctl.config import CourseConfig, load_course
from labctl.config.course import LAB_KEYS
from labctl.config.course_schema import CourseFile
from labctl.config.document import parse
from labctl.config.reader import as_plain, list_keys
from labctl.errors import ConfigError
from labctl.servers.provider_traits import read_provider_traits

REFERENCE = Path(__file__).parents[2] / "docs" / "course.yaml"
TEMPLATE = Path(__file__).parents[2] / "templates" / "course" / "course.yaml"
Load = Callable[[str], CourseConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def loaded(text: str) -> CourseConfig:
        (tmp_path / "course.yaml").write_text(text)
        return load_course(
            tmp_path,
            environ={"HOME": str(tmp_path)},
            find_provider=read_provider_traits,
        )

    return loaded


def problems(load: Load, text: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as raised:
        load(text)
    return {f"{one.line} {one.path}": one.message for one in raised.value.problems}


def test_the_reference_loads_without_a_problem(load: Load) -> None:
    config = load(REFERENCE.read_text())
    need = config.lab.server.need
    assert (config.name, need.budget_usd, need.ttl_s, need.max_ttl_s) == (
        "ml-2026",
        20.0,
        8 * 3600,
        12 * 3600,
    )
    assert config.assignments["hw3"].grade is not None
    assert config.assignments["hw3"].grade.command == ("python", "grade.py")
    assert config.assignments["hw3"].due is not None
    assert str(config.assignments["hw3"].due) == "2026-11-28T23:59:00+01:00"
    assert config.grading is not None
    assert config.grading.lab.limits.memory_bytes == 4 * 10**9
    assert config.lab.data["digits"].path == config.root / "shared" / "digits"
    assert config.keeper is not None
    assert config.keeper.user == "labctl"


def test_the_template_loads_with_every_comment_taken_away(load: Load) -> None:
    text = TEMPLATE.read_text().replace("NAME", "ml")
    assert load(text).name == "ml"
    lines = [
        line.replace("# ", "", 1)
        if line.startswith(("# hours", "# term", "# assign", "#   "))
        else line
        for line in text.splitlines()
    ]
    config = load("\n".join(lines))
    assert config.hours
    assert config.assignments["hw1"].penalty == 10


def struct_in(kind: Any) -> type[msgspec.Struct] | None:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return next(filter(None, map(struct_in, get_args(kind))), None)


def schema_keys(kind: type[msgspec.Struct], path: str = "") -> set[str]:
    found = set()
    for key, field in list_keys(kind).items():
        found.add(f"{path}{key}")
        inner = struct_in(field.type)
        if inner is not None and inner.__module__ == "labctl.config.course_schema":
            step = f"{path}{key}.*." if get_origin(field.type) is dict else f"{path}{key}."
            found |= schema_keys(inner, step)
    return found


def written_keys(value: Any, path: str = "") -> set[str]:
    if isinstance(value, list):
        return {key for item in value for key in written_keys(item, path)}
    found = set()
    for key, item in value.items() if isinstance(value, dict) else ():
        step = "*" if path in ("assignments.", "assignment_groups.") else key
        found |= {f"{path}{step}"} | written_keys(item, f"{path}{step}.")
    return found


def test_every_key_of_the_schema_stands_in_the_reference() -> None:
    text = REFERENCE.read_text()
    # The other engine of shared servers, whose keys exclude some of the first one's
    (slurm,) = [line[2:] for line in text.splitlines() if line.startswith("# shared: ")]
    written = set()
    for part in (text, slurm):
        top = parse(part.encode(), "", [])
        assert top is not None
        written |= written_keys(as_plain(top))
    wanted = schema_keys(CourseFile)
    assert {"hours.prewarm", "assignments.*.grade.tolerance", "per_student.disk"} <= wanted
    assert wanted - written == set()
    assert set(LAB_KEYS) - written == set()


def test_everything_wrong_is_told_at_once_with_its_line(load: Load) -> None:
    text = """course: ML 2026
sever: {provider: local}
per_student: {budget: free, ttl: 12h, max_ttl: 8h}
hours:
  - {days: [monday], from: "10:00", to: "12:00", zone: Europe/Berlin}
  - {days: [mon], from: "12:00", to: "10:00", zone: Mars/Base}
ssh_from: [192.0.2.1/24, everywhere]
keeper: {host: -oProxyCommand=x}
assignments:
  HW1: {due: "2026-11-28 23:59"}
  hw2: {due: "2026-11-28 23:59 Europe/Berlin", late: soon, penalty: 120, points: 0}
"""
    found = problems(load, text)
    assert {key.split()[0] for key in found} == {str(n) for n in (1, 2, 3, 5, 6, 7, 8, 10, 11)}
    assert found["2 sever"] == "unknown key; did you mean server?"
    assert "not a host name" in found["8 keeper.host"]
    assert len([key for key in found if key.startswith("11 ")]) == 3


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ("course: a\nserver: {budget: 5}\n", "2 server.budget", "belongs at per_student.budget"),
        ("course: a\nserver: {provider: course}\n", "2 server.provider", "provider of students"),
        (
            "course: a\ngrading: {server: {provider: course}}\n",
            "2 grading.server.provider",
            "provider of students",
        ),
        ("course: a\nserver: {provider: nope}\n", "2 server.provider", "no provider called"),
        ("course: a\nserver: {aws: {regoin: x}}\n", "2 server.aws.regoin", "did you mean"),
        ("course: a\nper_student: {ttl: 9h, max_ttl: 8h}\n", "2 per_student", "longer than"),
        ("course: a\nassignments: {hw1: {late: 2h}}\n", "2 assignments.hw1", "`due`"),
        ("course: a\nterm: {from: 2026-09-01, to: 2026-08-01}\n", "2 term", "before"),
        ("course: a\ngrading: {server: {gpu: T4:x}}\n", "2 grading.server.gpu", "after `:`"),
        ("course: a\ngrading: {data: {}}\n", "2 grading.data", "unknown key"),
        ("course: a\ngrading: grader.example.edu\n", "2 grading", "expected a mapping"),
        (
            "course: a\nassignments: {hw1: {grade: {labels: ../../etc}}}\n",
            "2 assignments.hw1.grade.labels",
            "is outside the lab",
        ),
        (
            "course: a\nassignments: {hw1: {grade: {labels: /etc}}}\n",
            "2 assignments.hw1.grade.labels",
            "is outside the lab",
        ),
        ("course: a\nimage: &x y\n", "2 ", "anchors"),
        ("course: a\ncourse: b\n", "2 course", "given twice"),
        ("shared: {accounts_per_server: 0}\ncourse: a\n", "1 shared.accounts_per_server", "1 to"),
        ("shared: {gpu_minutes: 60}\ncourse: a\n", "1 shared.gpu_minutes", "`engine: slurm`"),
        ("shared: {engine: slurm, gpu_lease: 1h}\ncourse: a\n", "1 shared.gpu_lease", "`engine: b"),
        ("shared: {engine: slurm}\nimage: {build: .}\ncourse: a\n", "2 image", "build no images"),
        ("shared: {engine: slurm, wall: 90s}\ncourse: a\n", "1 shared.wall", "whole minutes"),
        ("shared: {engine: pbs}\ncourse: a\n", "1 shared.engine", "pbs"),
        ("shared: {controller: gpu1}\ncourse: a\n", "1 shared.controller", "`engine: slurm`"),
        ("shared: {engine: slurm, homes: /x}\ncourse: a\n", "1 shared.homes", "`controller`"),
        (
            "shared: {engine: slurm, controller: g, homes: /x/../y}\ncourse: a\n",
            *("1 shared.homes", "not an absolute path"),
        ),
        (
            "shared: {engine: slurm, controller: '$(id)'}\ncourse: a\n",
            *("1 shared.controller", "not the name of a machine"),
        ),
        ("course: a\nserver: {executor: slurm}\n", "2 server.executor", "only a course grants"),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_stands(
    load: Load, text: str, key: str, said: str
) -> None:
    assert said in problems(load, text)[key]


def test_with_slurm_the_runs_of_a_class_are_jobs_on_one_server(load: Load) -> None:
    config = load("course: a\nshared: {engine: slurm, gpu_minutes: 1200, wall: 2h}\n")
    assert config.lab.submits_jobs
    assert config.shared is not None
    assert (config.shared.gpu_minutes, config.shared.wall) == (1200, 7200)
    assert config.shared.count_servers(300) == 1


def test_networks_of_the_course_are_the_providers_unless_it_has_its_own(load: Load) -> None:
    text = "course: a\nserver: {provider: aws}\nssh_from: [192.0.2.0/24]\n"
    assert load(text).lab.server.provider_settings["aws"].ssh_from == ("192.0.2.0/24",)
    own = text.replace("aws}", "aws, aws: {ssh_from: [198.51.100.0/24]}}")
    assert load(own).lab.server.provider_settings["aws"].ssh_from == ("198.51.100.0/24",)
    assert load(text.replace("aws", "local")).ssh_from == ("192.0.2.0/24",)


def test_this_machines_settings_count_and_switches_of_a_lab_do_not(tmp_path: Path) -> None:
    (tmp_path / "course.yaml").write_text("course: a\nserver: {provider: local}\n")
    environ = {
        "HOME": str(tmp_path),
        "LABCTL_BASE_IMAGE": "debian:12",
        "LABCTL_PROVIDER": "aws",
        "LABCTL_BUDGET": "99",
        "LABCTL_SERVER_AWS_PROFILE": "staff",
    }
    config = load_course(tmp_path, environ=environ)
    assert config.lab.base_image == "debian:12"
    assert config.lab.server.provider == "local"
    assert config.lab.server.need.budget_usd is None
    assert config.lab.server.provider_settings["aws"] == {"profile": "staff"}


def test_a_folder_without_the_file_or_with_an_empty_one_says_what_to_do(
    load: Load, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"there is no course\.yaml") as raised:
        load_course(tmp_path)
    assert "labctl course init" in raised.value.hint
    with pytest.raises(ConfigError, match="empty"):
        load("\n")
    assert "is required" in problems(load, "image: debian:12\n")["0 course"]
