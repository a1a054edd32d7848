"""A class compared with one server, on a simulated EC2: labctl's CPU time and API calls.

Whole commands are measured, as an instructor types them. The machines only accept SSH, so what is
measured is labctl's: `course up` of one seat and of many, a command on warm servers, and the status
of all students from the ledger.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fleet import count_calls, rehearsal
from benchmarks.measure import Comparison, NotDoneError, Row
from benchmarks.settings import Settings
from benchmarks.startup import LABCTL

MOST_TIMES = 3.0
SSH_S = 0.4
STATUS_S = 1.0
COURSE = """\
course: NAME
server: {provider: aws, gpu: none, spot: never}
per_student: {budget: 20.00, ttl: 8h, max_ttl: 12h}
"""


@dataclass(frozen=True)
class Figures:
    """The figures of one course: of its `course up`, and until `course down` has ended it."""

    cpu_s: float
    up_calls: int
    life_calls: int


def course(home: Path, env: dict[str, str], name: str, students: int) -> Path:
    """Create a new course with this many seats."""
    folder = home / name
    shutil.rmtree(folder, ignore_errors=True)
    rows = "".join(f"s{n:03},Student {n},,,lab-{n % 3}\n" for n in range(students))
    roster = home / f"{name}.csv"
    roster.write_text("id,name,email,team,section\n" + rows)
    _run(["init", name, "--roster", str(roster)], home, env)
    (folder / "course.yaml").write_text(COURSE.replace("NAME", name))
    return folder


def _run(words: list[str], cwd: Path, env: dict[str, str]) -> float:
    """Return the wall seconds of one command, which must exit with 0."""
    begun = time.perf_counter()
    line = [LABCTL, "course", *words]
    done = subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    took_s = time.perf_counter() - begun
    if done.returncode != 0:
        raise NotDoneError(f"course {' '.join(words)}: {(done.stderr or done.stdout)[-600:]}")
    return took_s


def run_course_up(folder: Path, env: dict[str, str], seats: int) -> float:
    """Run `course up` in a process that reports its own CPU time, and return that in seconds."""
    words = [sys.executable, "-m", "benchmarks.course", str(folder)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotDoneError(f"{seats} seats: {(done.stderr or done.stdout)[-600:]}")
    reply = json.loads(done.stdout)
    if reply["ready"] != seats:
        raise NotDoneError(f"not all of {seats} seats are ready")
    return float(reply["cpu_s"])


def compare(settings: Settings) -> Generator[Comparison]:
    """Compare the seats of a class with one seat, and measure the commands over all of them."""
    home, sizes = settings.home / "course", settings.sizes
    with rehearsal(home, "sshd") as env:
        yield Comparison(
            f"course up of {sizes.fleet} seats against one",
            _list_up_rows(_Courses(home, env), sizes.fleet),
            sizes.few,
        )
        crowd = _create_crowd(home, env, sizes.students)
        warm = course(home, env, "warm", sizes.servers)
        run_course_up(warm, env, sizes.servers)
        ssh = f"course ssh --all -- true, {sizes.servers} warm, after start-up"
        status = f"course status, {sizes.students} students"
        rows = [
            Row(ssh, lambda n: _ssh_all_s(warm, env), limit=SSH_S, against=ssh),
            Row(status, lambda n: _run(["status"], crowd, env), limit=STATUS_S, against=status),
        ]
        yield Comparison("commands over a class", rows, sizes.rounds)
        _run(["down", "--discard", "--yes"], warm, env)


def _list_up_rows(courses: _Courses, many: int) -> list[Row]:
    def row(name: str, seats: int, figure: Callable[[Figures], float], unit: str) -> Row:
        return Row(
            f"{name}, {seats} seat{'s' * (seats > 1)}",
            lambda number: figure(courses.measure(seats, number)),
            MOST_TIMES if seats > 1 else None,
            unit=unit,
            against="" if unit == "s" else f"{name}, 1 seat",
            ours=True,
        )

    kinds: tuple[tuple[str, Callable[[Figures], float], str], ...] = (
        ("own CPU time", lambda figures: figures.cpu_s, "s"),
        ("API calls", lambda figures: figures.up_calls, "calls"),
        ("API calls until `course down` ended", lambda figures: figures.life_calls, "calls"),
    )
    return [row(name, seats, figure, unit) for name, figure, unit in kinds for seats in (1, many)]


class _Courses:
    """One course per number of seats and round, which gives several rows their figures."""

    def __init__(self, home: Path, env: dict[str, str]) -> None:
        self.home, self.env = home, env
        self.known: dict[tuple[int, int], Figures] = {}

    def measure(self, seats: int, number: int) -> Figures:
        if (seats, number) not in self.known:
            self.known[seats, number] = self._create_and_end(seats, number)
        return self.known[seats, number]

    def _create_and_end(self, seats: int, number: int) -> Figures:
        folder = course(self.home, self.env, f"class-{seats}-{number}", seats)
        before = count_calls(self.env)
        cpu_s = run_course_up(folder, self.env, seats)
        up_calls = count_calls(self.env) - before
        _run(["down", "--discard", "--yes"], folder, self.env)
        return Figures(cpu_s, up_calls, count_calls(self.env) - before)


def _ssh_all_s(folder: Path, env: dict[str, str]) -> float:
    """Return the time of one command on all seats, without the start of the program."""
    start_s = _run(["--help"], folder, env)
    return _run(["ssh", "--all", "--", "true"], folder, env) - start_s


def _create_crowd(home: Path, env: dict[str, str], students: int) -> Path:
    """Create a course with a server for every seat, and an hourly check for a week."""
    folder = course(home, env, "crowd", students)
    lines, now = [], time.time()
    for number in range(students):
        about = {"seat": f"s{number:03}", "student": "", "by": "", "why": ""}
        detail: dict[str, Any] = {"server_id": f"i-{number}", "usd_per_hour": 0.5}
        begun = now - 40 * 3600
        lines.append(
            {"kind": "up", "at": begun, **about, "detail": {**detail, "created_at": begun}}
        )
        for hour in range(40):
            at = begun + hour * 3600
            cost = {**detail, "from": at, "until": at + 3600, "usd": 0.5, "idle_s": 60.0}
            lines.append({"kind": "cost", "at": at + 3600, **about, "detail": cost})
        lines.append({"kind": "down", "at": now, **about, "detail": detail})
    text = "".join(json.dumps({"n": n, **line}) + "\n" for n, line in enumerate(lines, 1))
    (folder / ".course" / "ledger.jsonl").write_text(text)
    return folder


def _up(folder: Path) -> dict[str, Any]:
    """In the measured process: the command line's own code, from its first import on."""
    sys.argv = ["labctl", "-C", str(folder), "course", "up", "--login-only", "--yes", "--json"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        from labctl.cli.exit_codes import run_and_exit
        from labctl.cli.groups import cli

        code = run_and_exit(cli)
    if code != 0:
        raise NotDoneError(f"course up ended with {code}: {said.getvalue()[-600:]}")
    own = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "ready": sum(not seat["error"] for seat in json.loads(said.getvalue())["seats"]),
        "cpu_s": own.ru_utime + own.ru_stime,
    }


if __name__ == "__main__":
    print(json.dumps(_up(Path(sys.argv[1]))))
