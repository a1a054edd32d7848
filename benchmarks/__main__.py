"""python -m benchmarks [--rounds N] [--only start-up|containers|aws] [--sky] [--image IMAGE]"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import containers, fleet, peers, startup
from benchmarks.measure import Row, in_turn, ratio

RESULTS = Path(__file__).parent / "results"
CACHE = Path.home() / ".cache" / "labctl-bench"


def main() -> int:
    options = _options()
    measured: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="labctl-bench-") as folder:
        home = Path(folder)
        if options.only in (None, "start-up"):
            fab = peers.program(CACHE, "fabric", install=not options.offline)
            sky = peers.program(CACHE, "skypilot", install=options.sky)
            rows = startup.rows(home / "startup", fab, sky)
            in_turn(rows, options.rounds)
            measured += rows
        if options.only in (None, "containers"):
            with containers.ready(home / "containers", options.image) as lab:
                rows = containers.rows(lab)
                in_turn(rows, options.rounds, containers.PAUSE_S)
                containers.check(lab, options.rounds)
            measured += rows
        clouds = fleet.run(home / "aws", options.rounds) if options.only in (None, "aws") else {}
    report = {"version": 1, **_circumstances(options.rounds), "rows": _lines(measured)}
    report["aws"] = clouds
    print(_table(report["rows"]))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{report['at'][:19].replace(':', '')}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten to {path}", file=sys.stderr)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--rounds", type=int, default=15, help="how often each side runs")
    parser.add_argument("--only", choices=["start-up", "containers", "aws"])
    parser.add_argument("--sky", action="store_true", help="install skypilot too (690 MB)")
    parser.add_argument("--offline", action="store_true", help="install nothing")
    image = os.environ.get("LABCTL_BASE_IMAGE") or containers.DEFAULT_IMAGE
    parser.add_argument("--image", default=image, help="what the containers are made from")
    return parser.parse_args()


def _circumstances(rounds: int) -> dict[str, Any]:
    ssh = subprocess.run(["ssh", "-V"], capture_output=True, text=True).stderr.strip()
    return {
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rounds": rounds,
        "cpus": os.cpu_count(),
        "load": [round(one, 1) for one in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "labctl": version("labctl"),
        "click": version("click"),
        "ssh": ssh,
        "peers": peers.VERSIONS,
    }


def _lines(rows: list[Row]) -> list[dict[str, Any]]:
    baselines = {row.group: row for row in reversed(rows)}
    return [
        {
            "group": row.group,
            "name": row.name,
            "median_ms": round(row.median_s * 1000, 1),
            "fastest_ms": round(min(row.seconds) * 1000, 1),
            "ratio": round(ratio(row, baselines[row.group]), 2),
            "target": row.target,
            "seconds": [round(one, 4) for one in row.seconds],
        }
        for row in rows
    ]


def _table(lines: list[dict[str, Any]]) -> str:
    head = ("", "median ms", "fastest ms", "ratio", "target")
    body = [
        (
            line["name"],
            f"{line['median_ms']:.0f}",
            f"{line['fastest_ms']:.0f}",
            f"{line['ratio']:.2f}",
            "" if line["target"] is None else f"<= {line['target']}",
        )
        for line in lines
    ]
    widths = [max(len(row[column]) for row in (head, *body)) for column in range(len(head))]
    out = []
    group = ""
    for line, row in zip([{"group": ""}, *lines], (head, *body), strict=True):
        if line["group"] != group:
            group = line["group"]
            out.append(f"\n{group} (ratio to the first row)")
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        out.append("  ".join(cells).rstrip())
    return "\n".join(out)


if __name__ == "__main__":
    sys.exit(main())
