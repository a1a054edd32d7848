"""python -m benchmarks [--only GROUP]... [--small] [--all-peers] [--offline] [--image IMAGE]"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import (
    containers,
    control,
    course,
    data,
    fleet,
    forwards,
    peers,
    report,
    soak,
    startup,
)
from benchmarks.boxes import Boxes, base_image, boxes
from benchmarks.measure import Row, in_turn
from benchmarks.peers import Peer
from benchmarks.slow_link import slow_link

RESULTS = Path(__file__).parent / "results"
CACHE = Path.home() / ".cache" / "labctl-bench"
GROUPS = (
    "start-up",
    "control",
    "fan-out",
    "data",
    "forward",
    "containers",
    "aws",
    "course",
    "soak",
)

# slow groups that need a simulated AWS
ON_DEMAND = ("aws", "course")


@dataclass(frozen=True)
class Sizes:
    """The sizes of all measurements. The targets apply to the full sizes."""

    rounds: int
    servers: int
    files: int
    big_mib: int
    forward_mib: int
    soak_s: float

    @property
    def few(self) -> int:
        """The number of rounds of slow measurements."""
        return max(1, self.rounds // 3)


FULL = Sizes(rounds=15, servers=20, files=10_000, big_mib=1024, forward_mib=512, soak_s=300.0)
SMALL = Sizes(rounds=2, servers=4, files=300, big_mib=32, forward_mib=64, soak_s=20.0)


@dataclass(frozen=True)
class Setting:
    home: Path
    sizes: Sizes
    found: dict[str, Peer]
    image: str
    slow_peers: bool


def main() -> int:
    options = _options()
    os.environ.setdefault("LABCTL_BASE_IMAGE", options.image)  # for labctl's own lab servers
    chosen = options.only or [group for group in GROUPS if group not in ON_DEMAND]
    wanted = [one for one in peers.WANTED if one not in peers.ON_DEMAND or options.all_peers]
    found = peers.peers(CACHE, wanted, install=not options.offline)
    sizes = SMALL if options.small else FULL
    if options.rounds:
        sizes = Sizes(**{**vars(sizes), "rounds": options.rounds})
    measured: list[Row] = []
    other: dict[str, Any] = {}
    before = _circumstances(sizes, found)
    with tempfile.TemporaryDirectory(prefix="labctl-bench-") as folder:
        setting = Setting(Path(folder), sizes, found, options.image, not options.no_slow_peers)
        for group in chosen:
            print(f"measuring: {group}", file=sys.stderr)
            made = MEASURES[group](setting)
            measured += made if isinstance(made, list) else []
            other |= made if isinstance(made, dict) else {}
    told = {"version": 2, **before, "rows": report.lines(measured), **other}
    told["load_after"] = _load()
    _publish(told)
    return 0


def _publish(told: dict[str, Any]) -> None:
    if told["rows"]:
        print(report.table(told["rows"]))
        print(f"\n{report.verdict(told['rows'])}")
    if "soak" in told:
        print(soak.table(told["soak"]))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{told['at'][:19].replace(':', '')}.json"
    path.write_text(json.dumps(told, indent=1) + "\n")
    print(f"\nwritten to {path}", file=sys.stderr)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    only = "run only this group; may be repeated. Default: all except aws and course"
    parser.add_argument("--only", action="append", choices=GROUPS, help=only)
    parser.add_argument(
        "--small", action="store_true", help="use small sizes, for a test of a few minutes"
    )
    parser.add_argument("--rounds", type=int, default=0, help="number of rounds of each side")
    parser.add_argument(
        "--all-peers", action="store_true", help="include skypilot and dstack (820 MB)"
    )
    parser.add_argument("--no-slow-peers", action="store_true", help="skip SFTP's first push")
    parser.add_argument("--offline", action="store_true", help="install nothing")
    parser.add_argument("--image", default=base_image(), help="base image of the servers")
    return parser.parse_args()


@contextmanager
def _servers(setting: Setting, name: str, count: int) -> Iterator[Boxes]:
    with boxes(setting.home / name, count, setting.image) as made:
        yield made


def _start_up(setting: Setting) -> list[Row]:
    rows = startup.rows(setting.home / "startup", setting.found)
    in_turn(rows, setting.sizes.rounds)
    return rows


def _control(setting: Setting) -> list[Row]:
    with _servers(setting, "control", 1) as made:
        rows = control.one_server(made, setting.found)
        in_turn(rows, setting.sizes.rounds)
        session = control.tmux_session(made)
        in_turn(session, setting.sizes.rounds)
    return [*rows, *session]


def _fan_out(setting: Setting) -> list[Row]:
    with _servers(setting, "fan-out", setting.sizes.servers) as made:
        rows = control.many_servers(made, setting.found)
        in_turn(rows, setting.sizes.rounds)
    return rows


def _data(setting: Setting) -> list[Row]:
    sizes, measured = setting.sizes, []
    with _servers(setting, "data", 1) as made:
        box = made.all[0]
        slow = setting.slow_peers
        steps: list[tuple[Callable[[], list[Row]], int]] = [
            (lambda: data.first_push(made, box, sizes.files, setting.found, slow), sizes.few),
            (lambda: data.push_again(made, box, sizes.files), sizes.rounds),
            (lambda: data.big_file(made, box, sizes.big_mib), sizes.few),
            (lambda: data.pull_big(made, box, sizes.big_mib, 1), sizes.few),
            (lambda: data.pull_big(made, box, sizes.big_mib, data.SHARDS), sizes.few),
            (lambda: data.text(made, box, sizes.big_mib // 4, data.FAST), sizes.few),
        ]
        for rows, rounds in steps:
            sides = rows()
            in_turn(sides, rounds)
            data.clear(made, box)
            measured += sides
        with slow_link(made, box, data.SLOW_BYTES_PER_S) as (behind, slow_box):
            sides = data.text(behind, slow_box, sizes.big_mib // 4, data.SLOW)
            in_turn(sides, sizes.few)
            measured += sides
    return measured


def _forward(setting: Setting) -> list[Row]:
    with (
        _servers(setting, "forward", 1) as made,
        forwards.doors(made, made.all[0]) as found,
    ):
        rows = forwards.rows(found, setting.sizes.forward_mib)
        in_turn(rows, setting.sizes.rounds)
    return rows


def _containers(setting: Setting) -> list[Row]:
    with containers.ready(setting.home / "containers", setting.image) as lab:
        rows = containers.rows(lab)
        in_turn(rows, setting.sizes.rounds, containers.PAUSE_S)
        containers.check(lab, setting.sizes.rounds)
    return rows


def _aws(setting: Setting) -> dict[str, Any]:
    return {"aws": fleet.run(setting.home / "aws", setting.sizes.rounds)}


def _course(setting: Setting) -> dict[str, Any]:
    return {"course": course.run(setting.home / "course", setting.sizes.rounds)}


def _soak(setting: Setting) -> dict[str, Any]:
    with containers.ready(setting.home / "soak", setting.image) as lab:
        return {"soak": soak.run(lab, setting.sizes.soak_s)}


MEASURES: dict[str, Callable[[Setting], list[Row] | dict[str, Any]]] = {
    "start-up": _start_up,
    "control": _control,
    "fan-out": _fan_out,
    "data": _data,
    "forward": _forward,
    "containers": _containers,
    "aws": _aws,
    "course": _course,
    "soak": _soak,
}


def _circumstances(sizes: Sizes, found: dict[str, Peer]) -> dict[str, Any]:
    ssh = subprocess.run(["ssh", "-V"], capture_output=True, text=True).stderr.strip()
    rsync = subprocess.run(["rsync", "--version"], capture_output=True, text=True).stdout
    engine = subprocess.run(
        ["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True
    )
    return {
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "sizes": vars(sizes),
        "cpus": os.cpu_count(),
        "cpu": _cpu(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": _load(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "labctl": version("labctl"),
        "click": version("click"),
        "ssh": ssh,
        "rsync": rsync.partition("\n")[0],
        "docker": engine.stdout.strip(),
        "peers": {package: peer.version for package, peer in found.items()},
    }


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _load() -> list[float]:
    return [round(one, 1) for one in os.getloadavg()]


if __name__ == "__main__":
    sys.exit(main())
