"""The screen of `top`: one picture of the server from its history, for any width and height."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from labctl.cli.exit_codes import clean
from labctl.cli.top_history import BARS, History
from labctl.insight.top import ContainerMetrics, GpuMetrics, ProcessMetrics, ServerMetrics
from labctl.model import Server, Value
from labctl.text import bytes_text, duration_text, price_or_free_text

# columns from which the wide layout is used
WIDE = 120
NARROW_BARS, WIDE_BARS = 16, 36
LEAST_PROCESSES = 3
HEADING = "dim"
_SERVICE = " (service)"
# memory used, as a share of its total, from which it is shown as a warning
FULL = 0.95
HELD_BY = {"thermal": "heat", "power": "power", "hardware": "protection"}


class About(Value, frozen=True):
    """What the picture shows besides figures. `cut` describes a lost connection, else it is ""."""

    server: Server
    lab_id: str
    cut: str = ""
    foot: str = ""
    bars: str = BARS


def render_server(history: History, about: About, width: int, height: int = 0) -> RenderableType:
    """Render the server in at most `height` lines (0: any number); processes are left out first."""
    now = history.now
    if now is None:
        return Text(about.cut or "waiting for the first sample")
    above: list[RenderableType] = [
        _render_head(now, about, width),
        Text(),
        _render_machine(now, history, about, width),
    ]
    lines = 7
    if now.gpus:
        above += [Text(), _render_gpus(now, history, about, width)]
        lines += 2 + len(now.gpus)
    if now.runs:
        above += [Text(), _render_runs(now, history, about, width)]
        lines += 2 + len(now.runs)
    free_lines = height - lines - 3 - (1 if about.foot or about.cut else 0)
    processes = now.processes[: max(LEAST_PROCESSES, free_lines)] if height else now.processes
    if processes:
        above += [Text(), _render_processes(processes, about, width)]
    foot = Text(clean(about.cut), "yellow") if about.cut else Text(about.foot, HEADING)
    return Group(*above, *([Text(), foot] if foot else []))


def _render_head(now: ServerMetrics, about: About, width: int) -> Text:
    server = about.server
    price = server.offer.price_usd_per_hour
    facts = [
        " ".join(filter(None, (server.provider, server.offer.type, server.offer.zone))),
        f"up {duration_text(now.at - server.created_at)}",
        price_or_free_text(price),
    ]
    text = Text().append(clean(server.alias), "bold").append(f"  {clean(', '.join(facts))}")
    clock = time.strftime("%H:%M:%S", time.localtime(now.at))
    text.truncate(max(8, width - len(clock) - 2), overflow="ellipsis")
    text.append(clock.rjust(max(1, width - text.cell_len)), HEADING)
    return text


def _make_table(*headings: str, last_grows: bool = False) -> Table:
    table = Table(
        box=None,
        show_header=bool(headings),
        header_style=HEADING,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        expand=False,
    )
    for column, heading in enumerate(headings):
        grows = last_grows and column == len(headings) - 1
        table.add_column(heading, no_wrap=True, overflow="ellipsis", ratio=1 if grows else None)
    return table


def _render_machine(now: ServerMetrics, history: History, about: About, width: int) -> Table:
    table = _make_table()
    bars = 0 if history.is_single_sample else WIDE_BARS if width >= WIDE else NARROW_BARS
    for min_width in (len("processor"), bars, 0, 0):
        table.add_column(no_wrap=True, min_width=min_width)

    def add_row(name: str, figure: str, note: str, key: str, maximum: float | None) -> None:
        line = history.render_line(key, bars, maximum, about.bars)
        table.add_row(name, Text(line, "cyan"), figure, Text(note, HEADING))

    def scale(key: str) -> str:
        """Write what the highest bar stands for, where that is no known limit."""
        highest = history.find_highest(key, bars)
        return f"max {rate_text(highest)}" if bars and highest else ""

    busy = (
        "not measured" if now.cpu_cores is None else f"{now.cpu_cores:.1f} of {now.cores:g} cores"
    )
    add_row("processor", busy, f"load {now.load:.1f}", "cpu", now.cores)
    add_row(
        "memory",
        amount_text(now.memory_bytes, now.memory_total_bytes),
        "",
        "memory",
        now.memory_total_bytes,
    )
    read, written = rate_text(now.disk_read_bytes_per_s), rate_text(now.disk_write_bytes_per_s)
    add_row("disk", f"{read} read, {written} written", scale("disk"), "disk", None)
    received, sent = rate_text(now.net_in_bytes_per_s), rate_text(now.net_out_bytes_per_s)
    add_row("network", f"{received} in, {sent} out", scale("network"), "network", None)
    table.add_row("space", "", f"{amount_text(now.disk_free_bytes, now.disk_total_bytes)} free")
    return table


def _render_gpus(now: ServerMetrics, history: History, about: About, width: int) -> Table:
    wide = width >= WIDE
    bars = 0 if history.is_single_sample else WIDE_BARS if wide else 8
    clock = ("CLOCK",) if wide else ()
    table = _make_table("GPU", "NAME", "USE", "MEMORY", "POWER", "TEMP", *clock, "HELD BY")
    for gpu in now.gpus:
        reasons = ", ".join(HELD_BY.get(why, clean(why)) for why in gpu.throttle)
        table.add_row(
            gpu.index,
            Text(_shorten(_gpu_name(gpu), 24 if wide else 14)),
            _gpu_use_text(gpu, history.render_line(f"gpu {gpu.index}", bars, 100.0, about.bars)),
            _memory_text(gpu.memory_bytes, gpu.memory_total_bytes),
            usage_text(gpu.power_w, gpu.power_limit_w, "W"),
            _temperature_text(gpu),
            *((usage_text(gpu.sm_clock_mhz, gpu.sm_clock_max_mhz, "MHz"),) if wide else ()),
            Text(_shorten(reasons, 24 if wide else 11), "red"),
        )
    return table


def _gpu_name(gpu: GpuMetrics) -> str:
    """Return `T4`, `A100-SXM4-40GB`, or for a MIG instance its size: its card is the row above."""
    name = gpu.name.removeprefix("NVIDIA ").removeprefix("Tesla ")
    return name[name.index("MIG ") :] if gpu.parent and "MIG " in name else name


def _gpu_use_text(gpu: GpuMetrics, line: str) -> Text:
    if gpu.parent:
        return Text("see its card", HEADING)
    use = Text().append(line, "green")
    return use.append(f" {gpu.use_percent:3.0f}%" if gpu.use_percent is not None else "    -")


def _temperature_text(gpu: GpuMetrics) -> Text:
    if gpu.temperature_c is None:
        return Text("-")
    return Text(f"{gpu.temperature_c:.0f} °C", "red" if "thermal" in gpu.throttle else "")


def _render_runs(now: ServerMetrics, history: History, about: About, width: int) -> Table:
    """Render the runs. GPU memory is only in a wide table; the processes show it in any."""
    wide = width >= WIDE
    gpus = wide and any(process.gpus for process in now.processes)
    table = _make_table(
        "RUN", "WHO", "CORES", "MEMORY", *(("GPU MEM",) if gpus else ()), "STEPS", "LEFT"
    )
    for run in now.runs:
        left = history.estimate_left_s(run)
        gpu_memory = (_gpu_memory(p for p in now.processes if p.name == run.name),) if gpus else ()
        table.add_row(
            Text(_fit_name(container_name(run, about.lab_id), 40 if wide else 16), "bold"),
            Text(_shorten(run.person, 12 if wide else 8)),
            usage_text(run.cpu_cores, run.cores, "", ".1f"),
            _memory_text(run.memory_bytes, run.memory_limit_bytes),
            *gpu_memory,
            _steps_text(run, about.bars, 20 if wide else 6),
            duration_text(left) if left is not None else "-",
        )
    return table


def container_name(run: ContainerMetrics | ProcessMetrics, lab_id: str) -> str:
    """Name a run by its id, with its lab if that is another; a service or container by its name."""
    if run.run:
        return run.run if run.lab_id == lab_id else f"{run.lab or run.lab_id[:6]}/{run.run}"
    return f"{run.service}{_SERVICE}" if run.service else run.name


def _fit_name(name: str, width: int) -> str:
    """Shorten the name of a container; a service first loses the word that says so."""
    return _shorten(name if len(name) <= width else name.removesuffix(_SERVICE), width)


def _steps_text(run: ContainerMetrics, bars: str, width: int) -> Text:
    if run.step is None:
        return Text("-")
    if not run.total_steps:
        return Text(f"{run.step:.0f}")
    done = round(width * min(1.0, max(0.0, run.step / run.total_steps)))
    full, empty = ("━", "─") if bars is BARS else ("#", ".")
    text = Text().append(full * done, "green")
    text.append(empty * (width - done), HEADING)
    return text.append(f" {run.step:.0f}/{run.total_steps:.0f}")


def _render_processes(processes: Sequence[ProcessMetrics], about: About, width: int) -> Table:
    gpus = any(process.gpus for process in processes)
    names = ("PID", "WHO", "IN", "CORES", "MEMORY", *(("GPU MEM",) if gpus else ()), "COMMAND")
    table = _make_table(*names, last_grows=True)
    table.expand = True
    table.width = width
    for process in processes:
        container = container_name(process, about.lab_id) if process.name else "-"
        table.add_row(
            str(process.pid),
            Text(_shorten(process.person, 12 if width >= WIDE else 8)),
            Text(_fit_name(container, 30 if width >= WIDE else 16)),
            f"{process.cpu_cores:.1f}",
            bytes_text(process.memory_bytes),
            *((_gpu_memory([process]),) if gpus else ()),
            Text(clean(process.command)),
        )
    return table


def _gpu_memory(processes: Iterable[ProcessMetrics]) -> str:
    amounts = [use.memory_bytes for process in processes for use in process.gpus]
    known = [amount for amount in amounts if amount is not None]
    return bytes_text(sum(known)) if known else ("unknown" if amounts else "-")


def _memory_text(used: float | None, total: float | None) -> Text:
    is_full = used is not None and total and used / total >= FULL
    return Text(amount_text(used, total, "/"), "yellow" if is_full else "")


def amount_text(used: float | None, total: float | None, between: str = " of ") -> str:
    """Write `3.2 of 15.5 GiB`; "-" for a size that was not measured. Both are bytes."""
    if used is None:
        return "-"
    if total is None:
        return bytes_text(used)
    used_text, total_text = bytes_text(used), bytes_text(total)
    number, _, unit = used_text.rpartition(" ")
    return f"{number if total_text.endswith(f' {unit}') else used_text}{between}{total_text}"


def usage_text(used: float | None, total: float | None, unit: str, form: str = ".0f") -> str:
    """Write `61/70 W`; "-" for a figure that was not measured."""
    if used is None:
        return "-"
    limit = f"/{total:g}" if total is not None else ""
    return f"{used:{form}}{limit} {unit}".rstrip()


def rate_text(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_text(bytes_per_s)}/s"


def _shorten(text: str, width: int) -> str:
    cleaned = clean(text).replace("\n", " ")
    return cleaned if len(cleaned) <= width else cleaned[: width - 1] + "…"
