"""Measures groups one after another: each within its time, and whatever happens to the others."""

from __future__ import annotations

import contextlib
import math
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.measure import Comparison, NotDoneError, Row
from benchmarks.report import draw_table, draw_verdict
from benchmarks.results import Results
from benchmarks.settings import Settings


@dataclass(frozen=True)
class Group:
    compare: Callable[[Settings], Generator[Comparison]]
    # the time with --quick: past it, no round and no comparison starts
    quick_s: float


def run_groups(groups: Mapping[str, Group], settings: Settings, results: Results) -> bool:
    """Measure all groups that the results lack; return whether none failed."""
    for group, entry in groups.items():
        if group in results.record.done:
            print(f"{group}: {results.path.name} has it", file=sys.stderr)
            continue
        print(f"measuring: {group}", file=sys.stderr)
        results.begin_group(group)
        try:
            _run_group(group, entry, settings, results)
        except Exception as error:
            traceback.print_exc()
            results.fail_group(group, error)
            print(f"{group} failed: {error}\n", flush=True)
    return not results.record.errors.keys() & groups.keys()


def _run_group(group: str, entry: Group, settings: Settings, results: Results) -> None:
    deadline = time.monotonic() + entry.quick_s if results.record.quick else math.inf
    cut_short = has_progress = False
    failures: list[str] = []
    with contextlib.closing(entry.compare(settings)) as comparisons:
        for whole in comparisons:
            comparison = whole.keep_judged() if results.record.quick else whole
            if results.has_measured(group, comparison):
                continue
            if has_progress and time.monotonic() > deadline:
                cut_short = True
                break
            has_progress = True
            failures += _measure(group, comparison, deadline, results)
            rows = results.save_rows(group, comparison, complete=True)
            print(f"{draw_table(rows, _draw_heading(group, comparison, results))}\n", flush=True)
    if failures:
        raise NotDoneError("; ".join(failures))
    results.end_group(group, cut_short=cut_short)


def _draw_heading(group: str, comparison: Comparison, results: Results) -> str:
    rounds = len(comparison.rows[0].figures)
    quick = ", QUICK FIGURES" if results.record.quick else ""
    return f"{group}: {comparison.title} ({rounds} round{'s' * (rounds != 1)}{quick})"


def _measure(
    group: str, comparison: Comparison, deadline: float, results: Results
) -> Iterable[str]:
    """Let every row take its turns, and save after each; return which rows failed, and why.

    A row that fails takes no further turn and has no figures. The others go on, unless one of them
    is compared with it.

    Whatever the time, one round follows the first: that one has cold caches, and judges nothing.
    """
    count = (comparison.rounds + 1) * len(comparison.rows)
    last = 0
    failures: dict[str, str] = {}
    with _draw_progress(f"{group}: {comparison.title}", count) as announce:
        for number in range(comparison.rounds + 1):
            if number > 1 and time.monotonic() > deadline:
                break
            last = number
            for row in comparison.rows:
                if row.name in failures:
                    continue
                announce(row)
                try:
                    row.take_turn(number, comparison.pause_s)
                except NotDoneError as error:
                    if comparison.is_baseline(row):
                        raise
                    row.figures.clear()
                    failures[row.name] = f"{comparison.title}: {row.name}: {error}"
                results.save_rows(group, comparison)
    comparison.finish(last)
    return failures.values()


@contextmanager
def _draw_progress(title: str, count: int) -> Iterator[Callable[[Row], None]]:
    """Draw a bar on a terminal; yield a function to call at the start of each turn."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task(title, total=count)
        turns = iter(range(count))

        def announce(row: Row) -> None:
            progress.update(task, description=f"{title}: {row.name}", completed=next(turns))

        yield announce


def print_verdict(results: Results) -> None:
    """Print which targets are missed, which groups failed, and where the figures are."""
    record = results.record
    if record.rows:
        print(draw_verdict(record.rows))
    for group in record.cut_short:
        print(f"{group}: its time with --quick ended before its last comparison")
    for group, error in record.errors.items():
        print(f"{group}: failed: {error}")
    if record.quick:
        print("QUICK FIGURES: few rounds and small data. The targets apply to a full run.")
    print(f"\nwritten to {results.path}", file=sys.stderr)
