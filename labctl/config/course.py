"""Load course.yaml like lab.yaml: all problems are reported at once, by line."""

from __future__ import annotations

from functools import reduce
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from labctl.config.course_schema import (
    ENGINE_KEYS,
    AssignmentConfig,
    CourseConfig,
    CourseFile,
    GradingConfig,
    LateRules,
)
from labctl.config.directories import copy_environment
from labctl.config.directories import find_paths as standard_paths
from labctl.config.document import Node, escape, make_problems_error, quote, read_bytes
from labctl.config.lab import LabConfigReader
from labctl.config.lab_checks import LISTS, NO_JOB_BUILDS
from labctl.config.lab_providers import ProviderFinder
from labctl.config.layers import (
    build_switch_layers,
    iterate_leaves,
    merge,
    read_file_layer,
    read_user_layer,
)
from labctl.config.reader import LAB_FILE, list_keys, make_problem, read_struct
from labctl.config.schema import MACHINE_KEYS, LabConfig, ProviderTraits
from labctl.errors import ConfigError, NotFoundError, Problem, UsageError

COURSE_FILE = "course.yaml"
# Keys of course.yaml with the same meaning as in lab.yaml, for every seat's lab.
# By how much weights may miss 100%: three groups of 33.33% each are fine.
WEIGHT_TOLERANCE = 0.05
LAB_KEYS = ("server", "image", "env", "secrets", "data", "outputs", "services", "store", "limits")


def load_course(
    path_or_dir: Path,
    *,
    environ: dict[str, str] | None = None,
    find_provider: ProviderFinder | None = None,
) -> CourseConfig:
    """Load the course of a folder or a course.yaml; ConfigError with every problem of the file.

    `find_provider` as in `load_lab`: without it the providers' sections stay unchecked.
    """
    path = path_or_dir.absolute()
    path = path / COURSE_FILE if path.is_dir() else path
    data = read_bytes(path, COURSE_FILE, hint="labctl course init NAME --roster FILE")
    if not data.strip(b"\xef\xbb\xbf \t\r\n"):
        raise ConfigError(f"{escape(str(path))} is empty", hint="write `course: NAME` into it")
    problems: list[Problem] = []
    known = [*list_keys(CourseFile), *LAB_KEYS]
    cache_dir = standard_paths(environ).cache_dir
    top = read_file_layer(data, LAB_FILE, known, problems, cache_dir)
    if problems and not top.value:
        raise _make_error(path, problems)
    loading = _CourseConfigReader(path, top, environ, find_provider, problems)
    config = loading.build_config(sha256(data).hexdigest())
    if config is None:
        raise _make_error(path, problems)
    return config


def _make_error(path: Path, problems: list[Problem]) -> ConfigError:
    hint = "labctl course plan   # after you fix these lines"
    return make_problems_error(escape(str(path)), problems, hint=hint)


def _is_of_machine(layer: Node) -> bool:
    """Whether a switch concerns this machine or a provider's own section.

    Only course.yaml, which was reviewed, decides what a course needs and costs: an LABCTL_GPU for
    the instructor's own lab must not change the servers of a class.
    """
    return all(key in MACHINE_KEYS or key.count(".") == 2 for key, _ in iterate_leaves(layer))


class _CourseConfigReader:
    """Reads one course, and collects the problems."""

    def __init__(
        self,
        path: Path,
        top: Node,
        environ: dict[str, str] | None,
        find_provider: ProviderFinder | None,
        problems: list[Problem],
    ) -> None:
        assert isinstance(top.value, dict)
        self.path = path
        self.nodes = top.value
        self.find_provider = find_provider
        self.problems = problems
        own_paths = standard_paths(environ)

        variables = copy_environment() if environ is None else environ
        self.home = own_paths.home
        self.below = read_user_layer(own_paths, problems)
        self.above = [
            layer for layer in build_switch_layers({}, variables) if _is_of_machine(layer)
        ]

    def build_config(self, file_hash: str) -> CourseConfig | None:
        """Return the course, or None if there are problems."""
        own = {key: node for key, node in self.nodes.items() if key in list_keys(CourseFile)}
        file = read_struct(Node(own, 0, LAB_FILE), CourseFile, "", self.problems)
        if file is None:
            return None
        lab = self.read_lab(file, {key: self.nodes[key] for key in LAB_KEYS if key in self.nodes})
        grading = self.read_grading(file)
        self.check_across(file)
        if lab.server.count > 1:
            self.add_problem("server.count", "each student of a course has one server")
        if self.problems:
            return None
        need = msgspec.structs.replace(
            lab.server.need,
            budget_usd=file.per_student.budget,
            ttl_s=file.per_student.ttl,
            max_ttl_s=file.per_student.max_ttl,
        )
        server = msgspec.structs.replace(lab.server, need=need)
        if file.shared is not None and file.shared.has_queue:
            server = msgspec.structs.replace(server, executor="slurm")
        return CourseConfig(
            name=file.course,
            root=self.path.parent,
            path=self.path,
            file_hash=file_hash,
            lab=msgspec.structs.replace(lab, server=server),
            instructor=file.instructor,
            shared=file.shared,
            per_student=file.per_student,
            hours=file.hours,
            term=file.term,
            holidays=file.holidays,
            missing=file.missing,
            ssh_from=file.ssh_from,
            store=lab.store,
            keeper=file.keeper,
            grading=grading,
            canvas=file.canvas,
            assignments=file.assignments,
            assignment_groups=file.assignment_groups,
        )

    def read_lab(self, file: CourseFile, nodes: dict[str, Node]) -> LabConfig:
        """Read the lab of every seat, as if these keys were in a lab.yaml."""
        entries = {**self.add_networks(file, nodes), "lab": Node(file.course)}
        layers = [self.below, Node(entries, 0, LAB_FILE), *self.above]
        top = reduce(merge, layers, Node({}, 0, LAB_FILE))
        loading = LabConfigReader(self.path, self.home, top, self.find_provider, self.problems)
        lab = loading.build_config()
        origins = {
            key: origin.replace(LAB_FILE, COURSE_FILE) for key, origin in lab.origins.items()
        }
        return msgspec.structs.replace(lab, origins=origins, beside={})

    def add_networks(self, file: CourseFile, nodes: dict[str, Node]) -> dict[str, Node]:
        """Add the course's `ssh_from` to a provider's section that can have it and does not."""
        server = nodes.get("server")
        if not file.ssh_from or server is None or not isinstance(server.value, dict):
            return nodes
        provider = server.value.get("provider", Node(None)).value
        if not isinstance(provider, str) or not self.has_networks_setting(provider):
            return nodes
        section = server.value.get(provider, Node({}, 0, LAB_FILE))
        if not isinstance(section.value, dict) or "ssh_from" in section.value:
            return nodes
        networks = Node([Node(network, 0, LAB_FILE) for network in file.ssh_from], 0, LAB_FILE)
        new_section = Node({**section.value, "ssh_from": networks}, section.line, LAB_FILE)
        new_server = Node({**server.value, provider: new_section}, server.line, LAB_FILE)
        return {**nodes, "server": new_server}

    def has_networks_setting(self, provider: str) -> bool:
        traits = self.find_traits(provider)
        return traits is not None and "ssh_from" in list_keys(traits.settings_type)

    def find_traits(self, provider: str) -> ProviderTraits | None:
        """Return a provider's traits; None if it is unknown, which reading the lab reports."""
        try:
            return self.find_provider(provider) if self.find_provider else None
        except (UsageError, NotFoundError):
            return None

    def read_grading(self, file: CourseFile) -> GradingConfig | None:
        """Read `grading`, the lab in which submissions are graded; it has no students' data."""
        node = self.nodes.get("grading")
        if node is None or node.value is None:
            return None
        if not isinstance(node.value, dict):
            message = "expected a mapping with server, image, limits"
            self.problems.append(make_problem(node, "grading", message))
            return None
        before = len(self.problems)
        self.check_provider(node.value, "grading.server.provider")
        known_keys = ("server", "image", "limits")
        for key, item in node.value.items():
            if key not in known_keys:
                message = f"unknown key; known keys: {', '.join(known_keys)}"
                self.problems.append(make_problem(item, f"grading.{escape(key)}", message))
        entries = {key: node.value[key] for key in known_keys if key in node.value}
        inner: list[Problem] = []
        named = Node({**entries, "lab": Node("grading")}, 0, LAB_FILE)
        top = reduce(merge, [self.below, named, *self.above], Node({}, 0, LAB_FILE))
        lab = LabConfigReader(self.path, self.home, top, self.find_provider, inner).build_config()
        self.problems += [Problem(f"grading.{p.path}", p.line, p.message) for p in inner]
        return None if len(self.problems) > before else GradingConfig(lab=lab)

    def check_across(self, file: CourseFile) -> None:
        """Check rules that concern several values."""
        for key in ("budget", "ttl", "max_ttl"):
            server = self.nodes.get("server", Node({})).value
            if isinstance(server, dict) and key in server:
                message = f"belongs at per_student.{key}: it applies to each student"
                self.problems.append(make_problem(server[key], f"server.{key}", message))
        limits = file.per_student
        if limits.ttl and limits.max_ttl and limits.ttl > limits.max_ttl:
            self.add_problem("per_student", "ttl is longer than max_ttl")
        self.check_provider(self.nodes, "server.provider")
        self.check_shared(file)
        for name, assignment in file.assignments.items():
            self.check_assignment(name, assignment)
        for name in file.canvas.assignments if file.canvas else ():
            if name not in file.assignments:
                message = f"there is no assignment {quote(name)} in this file"
                self.add_problem(f"canvas.assignments.{name}", message)

        self.check_groups(file)
        self.check_weights(file)

    def check_shared(self, file: CourseFile) -> None:
        """Report settings that the engine of shared servers does not have."""
        shared = self.nodes.get("shared", Node(None)).value
        if file.shared is None or not isinstance(shared, dict):
            return
        other = "broker" if file.shared.has_queue else "slurm"
        for key in ENGINE_KEYS[other]:
            if key in shared:
                message = f"only `engine: {other}` has this setting"
                self.problems.append(make_problem(shared[key], f"shared.{key}", message))
        if not file.shared.has_queue:
            return
        if "homes" in shared and not file.shared.controller:
            message = "only a class with `controller` has this setting"
            self.problems.append(make_problem(shared["homes"], "shared.homes", message))
        reasons = {
            "store": "results of jobs are not mirrored; `labctl pull` downloads them",
            "services": "services do not run with `engine: slurm`",
            "server.executor": "with `engine: slurm` each run is a job; leave this out",
            "server.idle": "with `engine: slurm` nothing measures whether the server is idle",
        }
        server = self.nodes.get("server", Node({})).value
        server_nodes = server if isinstance(server, dict) else {}
        nodes = {key: self.nodes.get(key) for key in ("store", "services")}
        nodes |= {f"server.{key}": server_nodes.get(key) for key in ("executor", "idle")}
        for path, node in nodes.items():
            if node is not None and node.value is not None:
                self.problems.append(make_problem(node, path, reasons[path]))
        image = self.nodes.get("image", Node(None))
        if isinstance(image.value, dict):
            message = f"{NO_JOB_BUILDS}; in an assignment's lab.yaml, also a list: {LISTS}"
            self.problems.append(make_problem(image, "image", message))

    def check_weights(self, file: CourseFile) -> None:
        """Report weights of groups that leave a part of the course without one, or are not 100%."""
        groups = file.assignment_groups
        if not any(group.weight for group in groups.values()):
            return
        if unweighted := [name for name, group in groups.items() if not group.weight]:
            message = "has no `weight`: give each group one, or none"
            self.add_problem(f"assignment_groups.{unweighted[0]}", message)
            return
        total = sum(group.weight for group in groups.values())
        if abs(total - 100) > WEIGHT_TOLERANCE:
            message = f"the weights add up to {total:g}%, and must be 100%"
            self.add_problem("assignment_groups", message)
        grouped = {name for group in groups.values() for name in group.assignments}
        if missing := [name for name in file.assignments if name not in grouped]:
            message = f"{', '.join(missing)}: in no group, so without a weight in the total"
            self.add_problem("assignment_groups", message)

    def check_groups(self, file: CourseFile) -> None:
        """Report assignments of groups that do not exist, or are in another group too."""
        group_by_name: dict[str, str] = {}
        for group, rules in file.assignment_groups.items():
            path = f"assignment_groups.{group}.assignments"
            for name in rules.assignments:
                if name not in file.assignments:
                    self.add_problem(path, f"there is no assignment {quote(name)} in this file")
                elif group_by_name.setdefault(name, group) != group:
                    message = f"{quote(name)} is in the group {quote(group_by_name[name])} already"
                    self.add_problem(path, message)

    def check_provider(self, nodes: dict[str, Node], path: str) -> None:
        """Refuse the provider of students: the course would request servers from itself."""
        server = nodes.get("server", Node({})).value
        provider = server.get("provider", Node(None)) if isinstance(server, dict) else Node(None)
        traits = self.find_traits(provider.value) if isinstance(provider.value, str) else None
        if traits is not None and traits.for_students:
            message = (
                f"{quote(str(provider.value))} is the provider of students; "
                "name the provider that the course's servers come from"
            )
            self.problems.append(make_problem(provider, path, message))
        elif traits is not None and traits.is_market:
            message = "name one provider: the servers of a course are planned and paid at one place"
            self.problems.append(make_problem(provider, path, message))

    def check_assignment(self, name: str, assignment: AssignmentConfig) -> None:
        path = f"assignments.{name}"
        if assignment.late and assignment.due is None:
            self.add_problem(path, "`late` counts from `due`, which is missing")
        if isinstance(assignment.late_rule, LateRules) and assignment.penalty_percent:
            message = "`late` has a mapping: write the percent there, as `per_day`"
            self.add_problem(f"{path}.penalty", message)
        if assignment.graded_points < 0:
            total = sum(assignment.rubric.values())
            message = f"its items are worth {total:g} points, more than `points`"
            self.add_problem(f"{path}.rubric", f"{message} ({assignment.points:g})")
        if assignment.grade and assignment.graded_points == 0:
            message = "the rubric has all of `points`, so `grade` would give none"
            self.add_problem(f"{path}.grade", message)

    def add_problem(self, path: str, message: str) -> None:
        """Add a problem at the line of a dotted path of the file."""
        node: Any = Node(self.nodes)
        for key in path.split("."):
            inner = node.value if isinstance(node.value, dict) else {}
            node = inner.get(key, Node(None))
        self.problems.append(Problem(path, node.line, message))
