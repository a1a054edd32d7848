"""The screen of `top` for several servers: a row for each, their GPUs and their runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from labctl.cli.exit_codes import clean
from labctl.cli.top_history import BARS, History
from labctl.cli.top_screen import (
    GPU_HEADINGS,
    GPU_OPTIONAL,
    HEADING,
    LEAST_BARS,
    NARROW,
    make_gpu_row,
    make_run_row,
    make_table,
    memory_text,
    rate_text,
    shorten,
    usage_text,
)
from labctl.insight.top import ContainerMetrics, ServerMetrics
from labctl.text import bytes_text

SERVER_HEADINGS = ("SERVER", "NAME", "CORES", "MEMORY", "NET IN", "NET OUT", "DISK FREE")
SERVER_OPTIONAL = ("DISK FREE", "NET OUT", "NET IN", "NAME", "MEMORY")
RUN_HEADINGS = ("SERVER", "RUN", "WHO", "CORES", "MEMORY", "STEPS", "LEFT")
RUN_OPTIONAL = ("WHO", "CORES", "MEMORY", "LEFT")
# a sample comes every second: an older one is not current
STALE_S = 10.0
# rows that a table keeps in a low terminal
LEAST_ROWS = 3
MORE = "labctl top --server N   # shows one server and its processes"


@dataclass
class ServerSamples:
    """One server: its rank, name and lab id, its samples, and why it does not answer, or ""."""

    rank: int
    name: str
    lab_id: str
    history: History = field(default_factory=History)
    cut: str = ""
    changed_at: float = field(default_factory=time.monotonic)

    def add(self, now: ServerMetrics) -> None:
        self.history.add(now)
        self.cut = ""
        self.changed_at = time.monotonic()

    @property
    def is_silent(self) -> bool:
        """Whether the server does not answer, or sends nothing although the connection is open."""
        return bool(self.cut) or time.monotonic() - self.changed_at > STALE_S

    @property
    def latest(self) -> ServerMetrics | None:
        """The latest sample, unless the server has stopped answering since."""
        return None if self.is_silent else self.history.now

    @property
    def runs(self) -> list[ContainerMetrics]:
        return [one for one in self.latest.runs if one.run] if self.latest else []


def render_overview(
    title: str,
    views: Sequence[ServerSamples],
    width: int,
    height: int = 0,
    *,
    foot: str = MORE,
    bars: str = BARS,
) -> RenderableType:
    """Render all servers in about `height` lines (0: any number); GPUs are left out first."""
    clock = time.strftime("%H:%M:%S")
    head = Text().append(clean(title), "bold")
    head.truncate(max(8, width - len(clock) - 2), overflow="ellipsis")
    head.append(clock.rjust(max(1, width - head.cell_len)), HEADING)
    above: list[RenderableType] = [head, Text(), _render_servers(views, width, bars)]
    above += [Text(clean(f"{one.name}: {one.cut}"), "yellow") for one in views if one.cut]
    gpus = [
        (Text(str(one.rank)), *make_gpu_row(gpu, one.history, bars, width - len("SERVER  ")))
        for one in views
        for gpu in (one.latest.gpus if one.latest else ())
    ]
    runs = [
        (Text(str(one.rank)), *make_run_row(run, one.history, one.lab_id, bars, width))
        for one in views
        for run in one.runs
    ]
    free_lines = height - len(above) - len(views) - 5
    runs, left_runs = _keep_first(runs, free_lines - 2, height)
    gpus, left_gpus = _keep_first(gpus, free_lines - len(runs) - 4, height)
    if gpus:
        above += [Text(), make_table(("SERVER", *GPU_HEADINGS), gpus, width, GPU_OPTIONAL)]
    if runs:
        above += [Text(), make_table(RUN_HEADINGS, runs, width, RUN_OPTIONAL)]
    left = [f"{left_gpus} GPUs"] * bool(left_gpus) + [f"{left_runs} runs"] * bool(left_runs)
    text = f"not shown: {', '.join(left)}; {foot}" if left else foot
    return Group(*above, Text(), Text(text, HEADING))


def _keep_first(
    rows: list[tuple[Text, ...]], room: int, height: int
) -> tuple[list[tuple[Text, ...]], int]:
    """Return the rows that fit, and the number of the others. Without a height, all fit."""
    kept = rows[: max(LEAST_ROWS, room)] if height else rows
    return kept, len(rows) - len(kept)


def _render_servers(views: Sequence[ServerSamples], width: int, bars: str) -> Table:
    rows = [_make_server_row(one, width, bars) for one in views]
    return make_table(SERVER_HEADINGS, rows, width, SERVER_OPTIONAL)


def _make_server_row(view: ServerSamples, width: int, bars: str) -> tuple[Text, ...]:
    begin = Text(str(view.rank), "bold"), Text(shorten(view.name, 16), "bold")
    now = view.latest
    if now is None:
        state = Text("no answer", "yellow") if view.is_silent else Text("connecting", HEADING)
        return (*begin, state, *[Text("-")] * (len(SERVER_HEADINGS) - 3))
    count = 0 if view.history.is_single_sample or width < NARROW else LEAST_BARS
    line = view.history.render_line("cpu", count, now.cores, bars)
    return (
        *begin,
        Text()
        .append(f"{line} " if line else "", "cyan")
        .append(usage_text(now.cpu_cores, now.cores, "", ".1f")),
        memory_text(now.memory_bytes, now.memory_total_bytes),
        Text(rate_text(now.net_in_bytes_per_s)),
        Text(rate_text(now.net_out_bytes_per_s)),
        Text("-" if now.disk_free_bytes is None else bytes_text(now.disk_free_bytes)),
    )
