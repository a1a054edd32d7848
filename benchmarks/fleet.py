"""A fleet of servers compared with one, on a simulated EC2: labctl's CPU time and API calls.

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
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Comparison, NotDoneError, Row, environment
from benchmarks.settings import Settings
from benchmarks.startup import LABCTL

MOST_TIMES = 3.0
LOGIN_S = 3.0
OFFERS_S = 0.3


@dataclass(frozen=True)
class Figures:
    """The figures of one process that created servers and ended them."""

    call_count: int
    cpu_s: float
    login_s: float


@contextlib.contextmanager
def rehearsal(home: Path, boot: str, *settings: str) -> Iterator[dict[str, str]]:
    """Run a simulated EC2 in its own process; yield the environment for it.

    `settings` are more of its settings, such as "delays.boot=30s".
    """
    home.mkdir(parents=True, exist_ok=True)
    words = [LABCTL, "rehearse", "aws"]
    for setting in (f"boot={boot}", *settings):
        words += ["--set", setting]
    with (
        (home / "rehearsal.log").open("w") as log,
        subprocess.Popen(
            words, env=environment(home), stdout=subprocess.PIPE, stderr=log, text=True
        ) as cloud,
    ):
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


def count_calls(env: dict[str, str]) -> int:
    """Return the number of API calls that the simulation has received."""
    address = f"{env['AWS_ENDPOINT_URL']}/rehearsal/state"
    request = urllib.request.Request(address, method="POST", headers={"X-Labctl-Rehearsal": "1"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        by_action: dict[str, int] = json.load(answer)["calls"]
    return sum(by_action.values())


def measure_process(servers: int, home: Path, env: dict[str, str]) -> Figures:
    """Measure one process that creates and ends this many servers."""
    before = count_calls(env)
    words = [sys.executable, "-m", "benchmarks.fleet", str(servers), str(home)]
    done = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise NotDoneError(f"{servers} servers: the process exited with {done.returncode}")
    return Figures(count_calls(env) - before, **json.loads(done.stdout))


def compare(settings: Settings) -> Generator[Comparison]:
    """Compare the servers of a fleet with one server; the baseline is the one."""
    home, many = settings.home / "aws", settings.sizes.fleet
    with rehearsal(home, "sshd") as env:
        processes = _Processes(home, env)

        def row(name: str, servers: int, figure: Callable[[Figures], float], unit: str) -> Row:
            return Row(
                f"{name}, {servers} server{'s' * (servers > 1)}",
                lambda number: figure(processes.measure(servers, number)),
                MOST_TIMES if servers > 1 else None,
                unit=unit,
                ours=True,
            )

        rows = [row("own CPU time", servers, _get_cpu_s, "s") for servers in (1, many)]
        count = [row("API calls", servers, _count_calls, "calls") for servers in (1, many)]
        for one in count:
            one.against = count[0].name
        login, offers = "first login", "labctl offers, warm cache"
        rows += [
            *count,
            Row(login, lambda n: processes.measure(1, n).login_s, limit=LOGIN_S, against=login),
            Row(offers, lambda n: _offers_s(home, env), limit=OFFERS_S, against=offers),
        ]
        yield Comparison(f"{many} simulated servers against one", rows, settings.sizes.few)


class _Processes:
    """One process per number of servers and round, which gives several rows their figures."""

    def __init__(self, home: Path, env: dict[str, str]) -> None:
        self.home, self.env = home, env
        self.known: dict[tuple[int, int], Figures] = {}

    def measure(self, servers: int, number: int) -> Figures:
        if (servers, number) not in self.known:
            self.known[servers, number] = measure_process(servers, self.home, self.env)
        return self.known[servers, number]


def _get_cpu_s(figures: Figures) -> float:
    return figures.cpu_s


def _count_calls(figures: Figures) -> float:
    return figures.call_count


def _offers_s(home: Path, env: dict[str, str]) -> float:
    begun = time.perf_counter()
    words = [LABCTL, "offers", "--provider", "aws", "--gpu", "any", "--json"]
    done = subprocess.run(words, cwd=home, env=env, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0 or not json.loads(done.stdout)["offers"]:
        raise NotDoneError("labctl offers gave none")
    return time.perf_counter() - begun


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
        return reachability.wait_until_reachable(context, server)[0]

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
    return {"cpu_s": own.ru_utime + own.ru_stime, "login_s": logged_in_s}


class _Yes:
    """A reporter that accepts every price."""

    def emit(self, event: object) -> None:
        pass

    def confirm(self, decision: object) -> bool:
        return True


if __name__ == "__main__":
    print(json.dumps(_make_and_end(int(sys.argv[1]), Path(sys.argv[2]))))
