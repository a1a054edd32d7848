"""python -m benchmarks [--only GROUP]... [--quick | --resume FILE] [--all-peers] [--offline]"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks import peers
from benchmarks.boxes import base_image
from benchmarks.circumstances import read_circumstances
from benchmarks.groups import GROUPS
from benchmarks.results import FOLDER, Results, UnreadableResultsError
from benchmarks.runner import print_verdict, run_groups
from benchmarks.settings import FULL, QUICK, Settings

CACHE = Path.home() / ".cache" / "labctl-bench"


def main() -> int:
    options = _parse_options()
    # a time-out must remove the servers too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.setdefault("LABCTL_BASE_IMAGE", options.image)  # for labctl's own lab servers
    results, found = _open_results(options)
    if not results.record.circumstances.is_this_tree:
        print("the installed labctl is not of this directory: pip install -e .", file=sys.stderr)
    groups = {group: GROUPS[group] for group in options.only or GROUPS}
    sizes, slow_peers = results.record.sizes, not options.no_slow_peers
    try:
        with tempfile.TemporaryDirectory(prefix="labctl-bench-") as folder:
            settings = Settings(Path(folder), sizes, found, options.image, slow_peers)
            code = 0 if run_groups(groups, settings, results) else 1
    except KeyboardInterrupt:
        code = 130
    print_verdict(results)
    if code:
        command = f"python -m benchmarks --resume {results.path}"
        print(f"To measure what is missing: {command}", file=sys.stderr)
    return code


def _open_results(options: argparse.Namespace) -> tuple[Results, dict[str, peers.Peer]]:
    """Return the results to fill, and the peers to measure: none if the figures are quick."""
    earlier: Results | None = options.resume
    quick = earlier.record.quick if earlier else options.quick
    wanted = [name for name in peers.WANTED if name not in peers.ON_DEMAND or options.all_peers]
    found = {} if quick else peers.peers(CACHE, wanted, install=not options.offline)
    if earlier:
        return earlier, found
    sizes = QUICK if quick else FULL
    if options.rounds:
        sizes = replace(sizes, rounds=options.rounds)
    return Results.create(FOLDER, sizes, read_circumstances(found), quick=quick), found


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    only = "run only this group; may be repeated. Default: all"
    parser.add_argument("--only", action="append", choices=[*GROUPS], help=only)
    quick = "use few rounds, small data and no peers, for a verdict in five minutes"
    parser.add_argument("--quick", action="store_true", help=quick)
    resume = "measure what this file of an earlier run lacks, with its sizes, and add it there"
    parser.add_argument("--resume", type=_load_results, metavar="FILE", help=resume)
    parser.add_argument("--rounds", type=int, default=0, help="number of rounds of each side")
    parser.add_argument(
        "--all-peers", action="store_true", help="include skypilot and dstack (820 MB)"
    )
    parser.add_argument("--no-slow-peers", action="store_true", help="skip SFTP's first push")
    parser.add_argument("--offline", action="store_true", help="install nothing")
    parser.add_argument("--image", default=base_image(), help="base image of the servers")
    options = parser.parse_args()
    if options.resume and (options.quick or options.rounds):
        parser.error("--resume cannot be combined with --quick or --rounds: FILE decides both")
    return options


def _load_results(path: str) -> Results:
    try:
        return Results.load(Path(path))
    except UnreadableResultsError as error:
        raise argparse.ArgumentTypeError(f"{error}. Start a new run without --resume.") from error


if __name__ == "__main__":
    sys.exit(main())
