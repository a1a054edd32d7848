"""Measure how fast each way adds two matrices, in bytes per second.

    python measure.py
    python measure.py --sizes 4096 8192 --repeat 50

An addition does one operation for 12 bytes, so the memory limits it. Started
again in the same place, it measures only what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

import evaluate
from kernels import Way, list_ways, read_card_bandwidth

# labctl sets these on a server. Elsewhere, everything is beside the code.
RUN = Path(os.environ.get("LABCTL_RUN_DIR", "."))
LOGS = Path(os.environ.get("LABCTL_LOG_DIR", RUN / "logs"))
CHECKPOINTS = Path(os.environ.get("LABCTL_CHECKPOINT_DIR", RUN / "checkpoints"))
RESULTS = CHECKPOINTS / "results.json"
SIZES = (256, 512, 1024, 2048, 4096)
SIZES_OF_A_GPU = (*SIZES, 8192, 16384)
WARM_UP = 3  # the first calls also load code and fill caches
BYTES = 4  # of a float


class StopRequest:
    """Notes SIGTERM (`labctl cancel` sends it) and Ctrl-C for the loop to see."""

    exit_code = 0

    def __init__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        self.exit_code = 128 + number


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = SIZES_OF_A_GPU if torch.cuda.is_available() else SIZES
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=default, help="rows, and as many columns")
    add("--repeat", type=int, default=20, help="measurements of each; the median counts")
    options = parser.parse_args()
    if min(*options.sizes, options.repeat) < 1:
        parser.error("--sizes and --repeat must be at least 1")
    LOGS.mkdir(parents=True, exist_ok=True)
    CHECKPOINTS.mkdir(parents=True, exist_ok=True)
    return Measurement(options, StopRequest()).run()


class Measurement:
    """Measures each way with each size, and writes each result down at once."""

    def __init__(self, options: argparse.Namespace, stop: StopRequest) -> None:
        self.options, self.stop = options, stop
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.name = platform.machine() + " CPU"
        if self.device.type == "cuda":
            self.name = torch.cuda.get_device_name()
        self.card = read_card_bandwidth()
        ways = list_ways()
        self.ways = [way for way in ways if way.add]
        self.missing = [way for way in ways if not way.add]
        self.rows = self.load()

    def load(self) -> list[dict[str, Any]]:
        """Return what an earlier start has measured on the same device."""
        if not RESULTS.exists():
            return []
        earlier = json.loads(RESULTS.read_text())
        if earlier["device"] != self.name:
            print(f"measuring again: the earlier results are of {earlier['device']}")
            return []
        print(f"continuing after {len(earlier['rows'])} measurements")
        return earlier["rows"]

    def run(self) -> int:
        """Measure until the end, or until a stop is requested. Return the exit code."""
        self.describe()
        todo = [(size, way) for size in self.options.sizes for way in self.ways]
        writer = SummaryWriter(str(LOGS))
        for number, (size, way) in enumerate(todo, 1):
            if self.stop.exit_code:
                print(f"stopped after {number - 1} of {len(todo)} measurements", flush=True)
                break
            row = self.find(size, way) or self.measure(size, way)
            print(self.format(row), flush=True)
            # The step of these curves is the number of rows.
            writer.add_scalar(f"gb_per_second/{way.name}", row["bytes_per_second"] / 1e9, size)
            write_json(LOGS / "progress.json", {"step": number, "total_steps": len(todo)})
        writer.close()
        if not self.stop.exit_code:
            self.report()
        return self.stop.exit_code

    def describe(self) -> None:
        of_card = f", memory of {self.card / 1e9:,.0f} GB/s" if self.card else ""
        print(f"on {self.name}{of_card}")
        if self.device.type == "cpu":
            print("No GPU here: torch adds on the CPU, and the kernels for GPUs do not run.")
        for way in self.missing:
            print(f"{way.name}: not run: {way.why_not}", flush=True)

    def find(self, size: int, way: Way) -> dict[str, Any] | None:
        return next(
            (row for row in self.rows if (row["size"], row["way"]) == (size, way.name)), None
        )

    def measure(self, size: int, way: Way) -> dict[str, Any]:
        """Measure one way, and write all results so far to a file."""
        a, b = (torch.rand(size, size, device=self.device) for _ in range(2))
        total = torch.empty_like(a)
        seconds = median(
            [self.time(way, a, b, total) for _ in range(WARM_UP + self.options.repeat)][WARM_UP:]
        )
        row = {"way": way.name, "size": size, "seconds": seconds}
        row["bytes_per_second"] = way.accesses * BYTES * size * size / seconds
        self.rows.append(row)
        results = {"device": self.name, "card_bytes_per_second": self.card, "rows": self.rows}
        write_json(RESULTS, results)
        return row

    def time(self, way: Way, a: Tensor, b: Tensor, total: Tensor) -> float:
        """Return the seconds of one addition. A GPU has a clock of its own: events."""
        if self.device.type == "cpu":
            started = time.perf_counter()
            way.add(a, b, total)
            return time.perf_counter() - started
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        way.add(a, b, total)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def format(self, row: dict[str, Any]) -> str:
        share = f"  {row['bytes_per_second'] / self.card:6.1%} of the card" if self.card else ""
        size = f"{row['size']} x {row['size']}"
        return (
            f"{size:>15}  {row['way']:<12}  {row['seconds'] * 1e6:>10,.0f} us  "
            f"{row['bytes_per_second'] / 1e9:>8,.1f} GB/s{share}"
        )

    def report(self) -> None:
        """Check the sums, and write the best figure of each way."""
        result = evaluate.examine()
        write_json(LOGS / "evaluation.json", {**result, "where": evaluate.WHERE})
        best = {
            way.name: max(row["bytes_per_second"] for row in self.rows if row["way"] == way.name)
            for way in self.ways
        }
        metrics = {f"{name}_gb_per_second": speed / 1e9 for name, speed in best.items()}
        if self.card:
            metrics |= {f"{name}_share_of_card": speed / self.card for name, speed in best.items()}
        write_json(LOGS / "metrics.json", {"accuracy": result["accuracy"], **metrics})
        print(f"{result['accuracy']:.2%} of {result['items']:,} sums are right", flush=True)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Replace a file, so that a reader sees either the old or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(values) + "\n")
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
