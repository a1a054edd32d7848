"""A class compared with one server, on a simulated EC2: labctl's CPU time and API calls.

Whole commands are measured, as an instructor types them. The machines only accept SSH, so what is
measured is labctl's: `course up` of one seat and of thirty, a command on twenty warm servers, and
the status of three hundred students from the ledger.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.fleet import calls, rehearsal
from benchmarks.measure import NotDoneError
from benchmarks.startup import LABCTL

MANY, WARM, CROWD = 30, 20, 300
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
    """The figures of one `course up`, after its servers have ended."""

    seats: int
    calls: dict[str, int]
    cpu_s: float
    children_cpu_s: float
    wall_s: float
    # until `course down` has ended them
    life_calls: int = 0

    @property
    def call_count(self) -> int:
        return sum(self.calls.values())


def course(home: Path, env: dict[str, str], name: str, students: int) -> Path:
    """Create a new course with this many seats."""
    folder = home / name
    shutil.rmtree(folder, ignore_errors=True)
    rows = "".join(f"s{n:03},Student {n},,,lab-{n % 3}\n" for n in range(students))
    roster = home / f"{name}.csv"
    roster.write_text("id,name,email,team,section\n" + rows)
    _done(["init", name, "--roster", str(roster)], home, env)
    (folder / "course.yaml").write_text(COURSE.replace("NAME", name))
    return folder


def _done(words: list[str], cwd: Path, env: dict[str, str]) -> float:
    """Return the wall seconds of one command, which must exit with 0."""
    begun = time.perf_counter()
    line = [LABCTL, "course", *words]
    done = subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    took_s = time.perf_counter() - begun
    if done.returncode != 0:
        raise NotDoneError(f"course {' '.join(words)}: {(done.stderr or done.stdout)[-600:]}")
    return took_s


def made(folder: Path, env: dict[str, str], seats: int) -> Figures:
    """Run `course up` in a process that reports its resource use; count its API calls."""
    before = calls(env)
    words = [sys.executable, "-m", "benchmarks.course", str(folder)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotDoneError(f"{seats} seats: {(done.stderr or done.stdout)[-600:]}")
    after = calls(env)
    said = json.loads(done.stdout)
    if said.pop("ready") != seats:
        raise NotDoneError(f"not all of {seats} seats are ready")
    spent = {name: count - before.get(name, 0) for name, count in sorted(after.items())}
    counted = {name: count for name, count in spent.items() if count}
    return Figures(seats=seats, calls=counted, **said)


def run(home: Path, rounds: int) -> dict[str, Any]:
    """Write all figures as a JSON object, and print their table."""
    with rehearsal(home, "sshd") as env:
        one = [_made_and_ended(home, env, 1, number) for number in range(rounds + 1)][1:]
        few = max(1, rounds // 3)
        many = [_made_and_ended(home, env, MANY, number) for number in range(few)]
        warm = course(home, env, "warm", WARM)
        made(warm, env, WARM)
        words = ["ssh", "--all", "--", "true"]
        _done(words, warm, env)
        ssh = [_done(words, warm, env) for _ in range(rounds)]
        start = [_done(["--help"], warm, env) for _ in range(rounds)]
        _done(["down", "--discard", "--yes"], warm, env)
        status = _status_s(home, env, rounds)
    best_one = min(one, key=lambda found: found.cpu_s)
    best_many = min(many, key=lambda found: found.cpu_s)
    report = {
        "cpu_ratio": round(best_many.cpu_s / best_one.cpu_s, 2),
        "call_ratio": round(best_many.call_count / best_one.call_count, 2),
        "life_call_ratio": round(best_many.life_calls / best_one.life_calls, 2),
        "ssh_all_s": round(min(ssh) - min(start), 3),
        "status_s": round(min(status), 3),
        "one": asdict(best_one),
        "many": asdict(best_many),
    }
    print(_table(report))
    return report


def _made_and_ended(home: Path, env: dict[str, str], seats: int, number: int) -> Figures:
    folder = course(home, env, f"class-{seats}-{number}", seats)
    before = sum(calls(env).values())
    found = made(folder, env, seats)
    _done(["down", "--discard", "--yes"], folder, env)
    return dataclasses.replace(found, life_calls=sum(calls(env).values()) - before)


def _status_s(home: Path, env: dict[str, str], rounds: int) -> list[float]:
    """Measure the whole process, with a server for every seat and an hourly check for a week."""
    folder = course(home, env, "crowd", CROWD)
    lines, now = [], time.time()
    for number in range(CROWD):
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
    return [_done(["status"], folder, env) for _ in range(rounds)]


def _table(report: dict[str, Any]) -> str:
    one, many = report["one"], report["many"]
    rows = [
        (f"course up, {MANY} seats / one: own CPU time", report["cpu_ratio"], MOST_TIMES),
        (f"course up, {MANY} seats / one: API calls", report["call_ratio"], MOST_TIMES),
        ("the same until `course down` ended them", report["life_call_ratio"], MOST_TIMES),
        (f"course ssh --all -- true, {WARM} warm, after start-up, s", report["ssh_all_s"], SSH_S),
        (f"course status, {CROWD} students, whole process, s", report["status_s"], STATUS_S),
    ]
    lines = [f"{name:<56}{value:>8.2f}   target <= {target:g}" for name, value, target in rows]
    lines.append(
        f"one: {one['cpu_s']:.2f} s CPU (and {one['children_cpu_s']:.2f} s of its ssh); "
        f"{MANY}: {many['cpu_s']:.2f} s (and {many['children_cpu_s']:.2f} s), "
        f"all ready after {many['wall_s']:.1f} s"
    )
    return "\n".join(["", "course, simulated", *lines])


def _up(folder: Path) -> dict[str, Any]:
    """In the measured process: the command line's own code, from its first import on."""
    begun = time.perf_counter()
    sys.argv = ["labctl", "-C", str(folder), "course", "up", "--login-only", "--yes", "--json"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        from labctl.cli.exit_codes import run_and_exit
        from labctl.cli.groups import cli

        code = run_and_exit(cli)
    if code != 0:
        raise NotDoneError(f"course up ended with {code}: {said.getvalue()[-600:]}")
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "ready": sum(not seat["error"] for seat in json.loads(said.getvalue())["seats"]),
        "cpu_s": own.ru_utime + own.ru_stime,
        "children_cpu_s": children.ru_utime + children.ru_stime,
        "wall_s": time.perf_counter() - begun,
    }


if __name__ == "__main__":
    print(json.dumps(_up(Path(sys.argv[1]))))
