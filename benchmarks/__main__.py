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


Part = list[Row] | dict[str, Any]


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
    results = _Results(_circumstances(sizes, found))
    with tempfile.TemporaryDirectory(prefix="labctl-bench-") as folder:
        setting = Setting(Path(folder), sizes, found, options.image, not options.no_slow_peers)
        for group in chosen:
            print(f"measuring: {group}", file=sys.stderr)
            for part in MEASURES[group](setting):
                results.add(part)
    results.print_verdict()
    return 0


class _Results:
    """Prints each part as it ends, and writes all of them at once: an interrupt loses nothing."""

    def __init__(self, circumstances: dict[str, Any]) -> None:
        self.found: dict[str, Any] = {"version": 2, **circumstances, "rows": []}
        RESULTS.mkdir(exist_ok=True)
        self.path = RESULTS / f"{self.found['at'][:19].replace(':', '')}.json"

    def add(self, part: Part) -> None:
        """Take rows of one comparison, or other figures by their name."""
        if isinstance(part, list):
            rows = report.lines(part)
            self.found["rows"] += rows
            print(f"{report.table(rows)}\n", flush=True)
        else:
            self.found |= part
            if "soak" in part:
                print(soak.table(part["soak"]), flush=True)
        self.found["load_after"] = _load()
        self.path.write_text(json.dumps(self.found, indent=1) + "\n")

    def print_verdict(self) -> None:
        """Print which targets are missed, and where the figures are."""
        if self.found["rows"]:
            print(report.verdict(self.found["rows"]))
        print(f"\nwritten to {self.path}", file=sys.stderr)


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


def _start_up(setting: Setting) -> Iterator[Part]:
    rows = startup.rows(setting.home / "startup", setting.found)
    yield in_turn(rows, setting.sizes.rounds)


def _control(setting: Setting) -> Iterator[Part]:
    with _servers(setting, "control", 1) as made:
        yield in_turn(control.one_server(made, setting.found), setting.sizes.rounds)
        yield in_turn(control.tmux_session(made), setting.sizes.rounds)


def _fan_out(setting: Setting) -> Iterator[Part]:
    with _servers(setting, "fan-out", setting.sizes.servers) as made:
        yield in_turn(control.many_servers(made, setting.found), setting.sizes.rounds)


def _data(setting: Setting) -> Iterator[Part]:
    sizes = setting.sizes
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
        for make_rows, rounds in steps:
            yield in_turn(make_rows(), rounds)
            data.clear(made, box)
        with slow_link(made, box, data.SLOW_BYTES_PER_S) as (behind, slow_box):
            text = data.text(behind, slow_box, sizes.big_mib // 4, data.SLOW)
            yield in_turn(text, sizes.few)


def _forward(setting: Setting) -> Iterator[Part]:
    with (
        _servers(setting, "forward", 1) as made,
        forwards.doors(made, made.all[0]) as found,
    ):
        rows = forwards.rows(found, setting.sizes.forward_mib)
        yield in_turn(rows, setting.sizes.rounds)


def _containers(setting: Setting) -> Iterator[Part]:
    with containers.ready(setting.home / "containers", setting.image) as lab:
        rows = containers.rows(lab)
        yield in_turn(rows, setting.sizes.rounds, containers.PAUSE_S)
        containers.check(lab, setting.sizes.rounds)


def _aws(setting: Setting) -> Iterator[Part]:
    yield {"aws": fleet.run(setting.home / "aws", setting.sizes.rounds)}


def _course(setting: Setting) -> Iterator[Part]:
    yield {"course": course.run(setting.home / "course", setting.sizes.rounds)}


def _soak(setting: Setting) -> Iterator[Part]:
    with containers.ready(setting.home / "soak", setting.image) as lab:
        yield {"soak": soak.run(lab, setting.sizes.soak_s)}


MEASURES: dict[str, Callable[[Setting], Iterator[Part]]] = {
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
