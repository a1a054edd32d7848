"""A watchdog outlives the client that armed it: today's client has one of before, and the reverse.

Each watchdog here can only give back a lease that does not exist: nothing ends this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from frozen import DIGITS, EngineSocket, Frozen

from labctl.errors import LabError, PolicyError
from labctl.servers import agent

WAIT_S = 60.0
# As somebody who is not root, so that no unit of systemd is touched, and with its own directory.
# `place`: the module of the program that says where a watchdog keeps its files.
HARNESS = """
import importlib, os, pathlib, sys
program, package, place, module, door, verb = sys.argv[1:7]
sys.argv = [program, verb]
sys.path.insert(0, program)
if package.startswith("labctl."):
    import types
    sys.modules["labctl"] = types.ModuleType("labctl")
    sys.modules["labctl"].__path__ = [program]
os.geteuid = lambda: 65534
there = pathlib.Path(place)
paths = importlib.import_module(package + "." + module)
def find(lab_id):
    limits = there / "limits.json"
    import json
    known = json.loads(limits.read_text()) if limits.exists() else {}
    return there if known.get("lab_id") == lab_id else None
today = ("own_directory", "find_directory")
own, found = ("own_dir", "found_dir") if package == "remote" else today
assert hasattr(paths, own) and hasattr(paths, found)
setattr(paths, own, lambda: there)
setattr(paths, found, find)
code = importlib.import_module(package + "." + door).main()
sys.stdout.flush()
os._exit(code)
"""


@dataclass
class Program:
    """The program at `path`, asked about the watchdog in `place`."""

    path: Path
    place: Path
    environ: dict[str, str]
    package: str = "remote"
    module: str = "watch_place"
    door: str = "door"
    begun: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def ask(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        words = [str(self.path), self.package, str(self.place), self.module, self.door, verb]
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", HARNESS, *words],
            input=json.dumps(request).encode() + b"\n",
            capture_output=True,
            env=self.environ,
            check=False,
        )
        found = agent.find_reply(done.stdout) or agent.find_reply(done.stderr)
        return agent.require_success(verb, found, done.returncode, done.stderr.decode())

    def watch(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask(
            "watch", {"lab": "digits", "lab_id": DIGITS, "decisions": 20}
        )["watch"]
        return found

    def start(self) -> None:
        """What an init does at boot."""
        words = [sys.executable, str(self.path), "watchdog", str(self.place)]
        with (self.place / "watchdog.log").open("ab") as log:
            self.begun.append(subprocess.Popen(words, stdout=log, stderr=log, env=self.environ))
        wait_until(lambda: self.watch().get("alive"), "the watchdog does not tick")

    def end(self) -> None:
        for one in self.begun:
            one.kill()
            one.wait()


def wait_until(condition: Any, said: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


@pytest.fixture
def place(frozen: Frozen) -> Iterator[Path]:
    """The directory of a watchdog that had counted ten minutes, a moment ago by these clocks."""
    found = frozen.unpack("watchdog")
    (frozen.root / "watched").mkdir()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    now = {"boot": boot, "boottime_s": time.clock_gettime(time.CLOCK_BOOTTIME)}
    for name in ("state.json", "status.json", "limits.json"):
        body = json.loads((found / name).read_text())
        own = body["age"] if name == "limits.json" else body
        own.update(now, **({} if name == "status.json" else {"wall_s": time.time()}))
        (found / name).write_text(json.dumps(body))
    (found / "lock").write_text("")
    yield found
    end_watchdog(found)


def end_watchdog(place: Path) -> None:
    """Kill the watchdog of a directory, and the script that would start it again."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(place).encode() in words or str(place / "start").encode() in words:
            os.kill(int(process.name), signal.SIGKILL)


@pytest.fixture
def environ(frozen: Frozen, engine: EngineSocket) -> dict[str, str]:
    home = str(frozen.root / "watched")
    return {"HOME": home, "PATH": os.environ["PATH"], "DOCKER_HOST": engine.host}


@pytest.fixture
def earlier(frozen: Frozen, place: Path, environ: dict[str, str]) -> Iterator[Program]:
    """Installed where a watchdog runs from."""
    program = frozen.unpack_agent()
    shutil.copytree(program, place / program.name)
    found = Program(place / program.name, place, environ)
    yield found
    found.end()


@pytest.fixture
def today(frozen: Frozen, place: Path, environ: dict[str, str]) -> Iterator[Program]:
    """Today's program, under a name that no earlier one had."""
    folder = frozen.root / "today" / "remote-of-today"
    for path, content in agent.list_program_files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    found = Program(folder, place, environ, "labctl.agent", "watchdog.state_files", "entrypoint")
    yield found
    found.end()


def test_a_watchdog_of_before_is_heard_and_given_more_time(
    frozen: Frozen, earlier: Program, today: Program
) -> None:
    earlier.start()
    before = frozen.value("watchdog.reply.json")["watch"]
    now = today.watch()
    assert now["alive"] is True
    assert now["version"] == earlier.path.name
    assert before.keys() <= now.keys()
    assert now["elapsed_s"] >= 600.0
    assert now["spent_usd"] == pytest.approx(600 / 3600 * 0.25, abs=0.01)
    assert "extended by 30 min" in [one["what"] for one in now["decisions"]]
    request = {"lab": "digits", "lab_id": DIGITS, "span_s": 3600}
    extended = today.ask("extend", request)["watch"]
    assert extended["edition"] == now["edition"] + 1
    assert extended["ttl_left_s"] == pytest.approx(now["ttl_left_s"] + 3600, abs=WAIT_S)
    with pytest.raises(PolicyError):
        today.ask("extend", {**request, "span_s": 30 * 3600})


def test_one_of_before_is_replaced_while_it_lives_and_forgets_nothing(
    frozen: Frozen, earlier: Program, today: Program
) -> None:
    earlier.start()
    before = today.watch()
    now = today.ask("guard", frozen.value("watchdog.guard.json"))["watch"]
    assert (now["alive"], now["version"]) == (True, today.path.name)
    assert now["pid"] != before["pid"]
    assert now["elapsed_s"] >= before["elapsed_s"]
    assert now["ttl_left_s"] == pytest.approx(before["ttl_left_s"], abs=WAIT_S)
    decisions = [one["what"] for one in now["decisions"]]
    assert "watchdog restarted" in decisions
    assert not earlier.path.exists(), "nobody runs it any more"


def test_an_earlier_client_hears_todays_watchdog(
    frozen: Frozen, earlier: Program, today: Program
) -> None:
    today.ask("guard", frozen.value("watchdog.guard.json"))
    shutil.copytree(frozen.root / "agent" / earlier.path.name, frozen.root / "old")
    old = Program(frozen.root / "old", today.place, today.environ)
    heard = old.watch()
    assert (heard["alive"], heard["version"]) == (True, today.path.name)
    assert frozen.value("watchdog.reply.json")["watch"].keys() <= heard.keys()
    extended = old.ask("extend", {"lab": "digits", "lab_id": DIGITS, "span_s": 1800})["watch"]
    assert extended["ttl_left_s"] > heard["ttl_left_s"]


@pytest.mark.parametrize("which", ["earlier", "today"])
def test_a_limit_that_only_a_newer_labctl_knows_is_left_alone(
    earlier: Program, today: Program, place: Path, which: str
) -> None:
    """A newer client writes the limits that an earlier watchdog and an earlier client read."""
    limits = place / "limits.json"
    body = json.loads(limits.read_text())
    body["limits"]["of_tomorrow_s"] = 60.0
    limits.write_text(json.dumps(body))
    (earlier if which == "earlier" else today).start()
    before = today.watch()
    extended = today.ask("extend", {"lab": "digits", "lab_id": DIGITS, "span_s": 1800})["watch"]
    assert extended["ttl_left_s"] > before["ttl_left_s"]
    assert json.loads(limits.read_text())["limits"]["of_tomorrow_s"] == 60.0


def test_a_verb_that_it_does_not_know_is_an_error_that_names_it(today: Program) -> None:
    with pytest.raises(LabError, match="has no verb 'of-tomorrow'"):
        today.ask("of-tomorrow", {})
