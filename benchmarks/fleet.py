"""Thirty servers compared with one, on a simulated EC2: labctl's CPU time and API calls.

The machines only accept SSH and boot at once, so what is measured is labctl's: offers from a warm
cache, one RunInstances each, describing, waiting for a login on every one, and the end of all
with what they shared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import NotDoneError, environment
from benchmarks.startup import LABCTL

MANY = 30
MOST_TIMES = 3.0
LOGIN_S = 3.0
OFFERS_S = 0.3


@dataclass(frozen=True)
class Figures:
    """The figures of one process that created `servers` servers and ended them."""

    servers: int
    calls: dict[str, int]
    cpu_s: float
    children_cpu_s: float
    login_s: float
    ended_s: float

    @property
    def call_count(self) -> int:
        return sum(self.calls.values())


@contextlib.contextmanager
def rehearsal(home: Path, boot: str) -> Iterator[dict[str, str]]:
    """Run a simulated EC2 in its own process; yield the environment for it."""
    home.mkdir(parents=True, exist_ok=True)
    words = [LABCTL, "rehearse", "aws", "--set", f"boot={boot}"]
    with subprocess.Popen(words, env=environment(home), stdout=subprocess.PIPE, text=True) as cloud:
        try:
            assert cloud.stdout is not None
            found = environment(home)
            for line in cloud.stdout:
                word, _, rest = line.strip().partition(" ")
                if word == "export":
                    name, _, value = rest.partition("=")
                    found[name] = value
                elif word != "unset":
                    break
                if "LABCTL_SERVER_AWS_ADDRESS_FROM" in found:
                    break
            yield found
        finally:
            cloud.terminate()


def calls(env: dict[str, str]) -> dict[str, int]:
    """Return the simulation's API calls so far, by action."""
    address = f"{env['AWS_ENDPOINT_URL']}/rehearsal/state"
    request = urllib.request.Request(address, method="POST", headers={"X-Labctl-Rehearsal": "1"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        counted: dict[str, int] = json.load(answer)["calls"]
    return counted


def measured(servers: int, home: Path, env: dict[str, str]) -> Figures:
    """Measure one process that creates and ends this many servers."""
    before = calls(env)
    words = [sys.executable, "-m", "benchmarks.fleet", str(servers), str(home)]
    done = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise NotDoneError(f"{servers} servers: the process exited with {done.returncode}")
    after = calls(env)
    said = json.loads(done.stdout)
    spent = {name: count - before.get(name, 0) for name, count in sorted(after.items())}
    return Figures(servers=servers, calls={k: v for k, v in spent.items() if v}, **said)


def run(home: Path, rounds: int) -> dict[str, Any]:
    """Write all figures as a JSON object, and print their table."""
    with rehearsal(home, "sshd") as env:
        measured(1, home, env)  # images are built, caches filled
        one = [measured(1, home, env) for _ in range(rounds)]
        many = [measured(MANY, home, env) for _ in range(max(1, rounds // 3))]
        listed = [_offers_s(home, env) for _ in range(rounds)]
    best_one, best_many = min(one, key=_cpu), min(many, key=_cpu)
    report = {
        "cpu_ratio": round(_cpu(best_many) / _cpu(best_one), 2),
        "call_ratio": round(best_many.call_count / best_one.call_count, 2),
        "login_of_one_s": round(min(f.login_s for f in one), 2),
        "logins_of_all_s": round(min(f.login_s for f in many), 2),
        "offers_s": round(min(listed), 3),
        "one": asdict(best_one),
        "many": asdict(best_many),
    }
    print(_table(report))
    return report


def _cpu(figures: Figures) -> float:
    return figures.cpu_s


def _offers_s(home: Path, env: dict[str, str]) -> float:
    begun = time.perf_counter()
    words = [LABCTL, "offers", "--provider", "aws", "--gpu", "any", "--json"]
    done = subprocess.run(words, cwd=home, env=env, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0 or not json.loads(done.stdout)["offers"]:
        raise NotDoneError("labctl offers gave none")
    return time.perf_counter() - begun


def _table(report: dict[str, Any]) -> str:
    one, many = report["one"], report["many"]
    rows = [
        (f"{MANY} servers / one: own CPU time", report["cpu_ratio"], MOST_TIMES),
        (f"{MANY} servers / one: API calls", report["call_ratio"], MOST_TIMES),
        ("up to the first login, s", report["login_of_one_s"], LOGIN_S),
        ("offers from a warm cache, whole process, s", report["offers_s"], OFFERS_S),
    ]
    lines = [f"{name:<46}{value:>8.2f}   target <= {target:g}" for name, value, target in rows]
    lines.append(
        f"one: {one['cpu_s']:.2f} s CPU (and {one['children_cpu_s']:.2f} s of its ssh); "
        f"{MANY}: {many['cpu_s']:.2f} s (and {many['children_cpu_s']:.2f} s), "
        f"all logged in after {report['logins_of_all_s']:.1f} s"
    )
    return "\n".join(["", "aws, simulated", *lines])


def _make_and_end(count: int, home: Path) -> dict[str, float]:
    """Run in the measured process: create labs of one group, log in to each, end them."""
    import msgspec

    from labctl.lab import Lab
    from labctl.lifecycle import fleet
    from labctl.model import Server
    from labctl.servers import adoption, attempts, end_server, reachability
    from labctl.servers.context import LabContext

    begun = time.perf_counter()
    root = home / "fleet"
    root.mkdir(parents=True, exist_ok=True)
    (root / "lab.yaml").write_text("lab: fleet\nserver: {provider: aws, gpu: none}\n")
    lab = Lab.load(root, reporter=_Yes())
    first = dataclasses.replace(lab.context, group=f"fleet{count}")
    run_id = f"{os.getpid():x}"
    contexts = [
        first.make_sibling(
            msgspec.structs.replace(first.config, name=f"fleet{number}"), f"b{run_id}-{number}"
        )
        for number in range(count)
    ]
    listed = first.provider.servers()

    def reach(context: LabContext) -> Server:
        need = context.config.server.need
        server = adoption.adopt(context, listed) or attempts.create_server(context, need)
        return reachability.reach(context, server)[0]

    made = fleet.run_for_each(contexts, reach)
    for outcome in made:
        if outcome.error is not None:
            raise outcome.error
    logged_in_s = time.perf_counter() - begun
    end_server.end(contexts[0], [one.value for one in made if one.value is not None])
    left = first.provider.leftovers()
    shared = [one for one in left if one.lab_id == first.group and one.expires_at is None]
    end_server.remove_resources(contexts[0], shared)
    if any(server.lab_id.startswith(f"b{run_id}-") for server in first.provider.servers()):
        raise NotDoneError("servers are left")
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "cpu_s": own.ru_utime + own.ru_stime,
        "children_cpu_s": children.ru_utime + children.ru_stime,
        "login_s": logged_in_s,
        "ended_s": time.perf_counter() - begun,
    }


class _Yes:
    """A reporter that accepts every price."""

    def emit(self, event: object) -> None:
        pass

    def confirm(self, decision: object) -> bool:
        return True


if __name__ == "__main__":
    print(json.dumps(_make_and_end(int(sys.argv[1]), Path(sys.argv[2]))))
