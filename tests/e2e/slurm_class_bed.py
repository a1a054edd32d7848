"""A class whose engine is Slurm, on one machine or on several, with the commands of its staff."""

from __future__ import annotations

import json
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from course_bed import CourseBed, course_bed
from shared_bed import Agreeing
from slurm_machine import DEVICES, slurm_machine
from sshd_container import Sshd, docker
from submit_bed import SSHD

from labctl.config import find_paths
from labctl.courses.seat_operations import CachingCourseOperator
from labctl.courses.servers import CourseOperator, bring_up_servers
from labctl.courses.shared_seats import SharedSeats
from labctl.state import State

MARKS = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(
        not (Path(SSHD).exists() and shutil.which("ssh")),
        reason="there is no sshd on this machine",
    ),
]
LIMITS = "shared: {{engine: slurm, gpus: 1, gpu_minutes: {minutes}, wall: 10m}}\n"
CLUSTER_LIMITS = (
    "shared: {{engine: slurm, controller: '127.0.0.1:{port}', homes: {homes}, gpus: 1, "
    "gpu_minutes: 1200, wall: 10m}}\n"
)
HOMES = "/srv/class"
ROSTER = "id,name,email,team,section,active\nalice,Alice,,,,{alice}\nbob,Bob,,,,yes\n"
SHOW = "sacctmgr -nP show assoc account=course-ml-2026 format=User,QOS,GrpTRESMins"


@contextmanager
def run_machines(
    server_image: str,
    factory: pytest.TempPathFactory,
    names: Sequence[str],
    devices: Sequence[str] = DEVICES,
) -> Iterator[list[Sshd]]:
    """Machines with these host names that share one directory, HOMES."""
    volume = f"labctl-test-homes-{uuid.uuid4().hex[:8]}"
    docker("volume", "create", volume)
    try:
        with ExitStack() as stack:
            yield [
                stack.enter_context(
                    slurm_machine(
                        server_image,
                        factory.mktemp(name),
                        ["--hostname", name, "-v", f"{volume}:{HOMES}"],
                        devices,
                    )
                )
                for name in names
            ]
    finally:
        docker("volume", "rm", "--force", volume)


@contextmanager
def run_class(boxes: Sequence[Sshd], folder: Path, settings: str) -> Iterator[CourseBed]:
    """A class of alice and bob on these machines, whose host keys its staff knows."""
    with course_bed(folder, list_hosts(boxes), settings) as bed:
        (folder / "ml" / "roster.csv").write_text(ROSTER.format(alice="yes"))
        known = folder / "keeper-home" / ".ssh" / "known_hosts"
        known.parent.mkdir(parents=True)
        known.write_text("".join(f"[127.0.0.1]:{box.port} {box.host_key}\n" for box in boxes))
        yield bed


def list_hosts(boxes: Sequence[Sshd]) -> str:
    """The section `server` of course.yaml."""
    hosts = ", ".join(
        f"{{host: 127.0.0.1, port: {box.port}, user: student, identity: {box.key}}}"
        for box in boxes
    )
    return f"{{provider: static, static: {{hosts: [{hosts}]}}}}"


def run_course(bed: CourseBed, *words: str) -> subprocess.CompletedProcess[str]:
    """What staff type: `labctl course ...`."""
    argv, environ = bed.command(*words)
    return subprocess.run(
        argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def make_staff(bed: CourseBed, by: str = "staff") -> CourseOperator:
    """As a process that has just begun has it: nothing is remembered."""
    home = bed.folder / "keeper-home"
    home.mkdir(exist_ok=True)
    places = find_paths({"HOME": str(home)})
    return CachingCourseOperator(bed.course, places, State(places.database), Agreeing(), by=by)


def bring_up(bed: CourseBed) -> None:
    """`labctl course up`."""
    staff = make_staff(bed)
    outcomes = bring_up_servers(staff, staff.folder.list_seats())
    assert [outcome.error + outcome.why for outcome in outcomes if outcome.error] == []


def list_users(box: Sshd) -> list[str]:
    return sorted(line for line in box.sh(SHOW).splitlines() if not line.startswith("|"))


def count_changes(bed: CourseBed) -> int:
    """How many changes Slurm's accounting of the class would need now."""
    provider = make_staff(bed).course().provider
    assert isinstance(provider, SharedSeats)
    hosts = provider.hosts
    (server,) = hosts.list_servers_by_number(now=True).values()
    context = hosts.build_context(1)
    recorded = context.state.get_server(server.id)
    assert recorded is not None
    return hosts.queue.update(context, recorded)


def join(bed: CourseBed, student: str) -> Path:
    output = bed.labctl(student, "join", str(bed.invited(student)), "--yes", "--json")[0]
    return Path(json.loads(output)["joined"]["directory"])


def find_lab(bed: CourseBed, student: str) -> Path:
    """The directory that `join` made."""
    return next(bed.home(student).rglob("lab.yaml")).parent
