"""How `top` looks: one picture of the server from its history, for any width and height."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from labctl.cli.exit_codes import clean
from labctl.cli.screen import size, span
from labctl.cli.top_history import BARS, History
from labctl.insight.top import GpuNow, ProcessNow, RunNow, ServerNow
from labctl.model import Server, Value

WIDE = 120
NARROW_BARS, WIDE_BARS = 16, 36
LEAST_PROCESSES = 3
HEADING = "dim"
FULL = 0.95
HELD_BY = {"thermal": "heat", "power": "power", "hardware": "protection"}


class About(Value, frozen=True):
    """What the picture says besides the figures. `cut` tells of a lost link, "" while it holds."""

    server: Server
    lab_id: str
    cut: str = ""
    foot: str = ""
    bars: str = BARS


def picture(history: History, about: About, width: int, height: int = 0) -> RenderableType:
    """At most `height` lines, where that is above 0: processes give way first."""
    now = history.now
    if now is None:
        return Text(about.cut or "waiting for the first sample")
    above: list[RenderableType] = [
        _head(now, about, width),
        Text(),
        _machine(now, history, about, width),
    ]
    lines = 7
    if now.gpus:
        above += [Text(), _gpus(now, history, about, width)]
        lines += 2 + len(now.gpus)
    if now.runs:
        above += [Text(), _runs(now, history, about, width)]
        lines += 2 + len(now.runs)
    room = height - lines - 3 - (1 if about.foot or about.cut else 0)
    shown = now.processes[: max(LEAST_PROCESSES, room)] if height else now.processes
    if shown:
        above += [Text(), _processes(shown, about, width)]
    foot = Text(clean(about.cut), "yellow") if about.cut else Text(about.foot, HEADING)
    return Group(*above, *([Text(), foot] if foot else []))


def _head(now: ServerNow, about: About, width: int) -> Text:
    server = about.server
    price = server.offer.price_usd_per_hour
    said = [
        " ".join(filter(None, (server.provider, server.offer.type, server.offer.zone))),
        f"up {span(now.at - server.created_at)}",
        f"{price:.2f} dollars an hour" if price else "costs nothing",
    ]
    text = Text().append(clean(server.alias), "bold").append(f"  {clean(', '.join(said))}")
    clock = time.strftime("%H:%M:%S", time.localtime(now.at))
    text.truncate(max(8, width - len(clock) - 2), overflow="ellipsis")
    text.append(clock.rjust(max(1, width - text.cell_len)), HEADING)
    return text


def _grid(*headings: str, last_grows: bool = False) -> Table:
    table = Table(
        box=None,
        show_header=bool(headings),
        header_style=HEADING,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        expand=False,
    )
    for place, heading in enumerate(headings):
        grows = last_grows and place == len(headings) - 1
        table.add_column(heading, no_wrap=True, overflow="ellipsis", ratio=1 if grows else None)
    return table


def _machine(now: ServerNow, history: History, about: About, width: int) -> Table:
    table = _grid()
    bars = 0 if history.single else WIDE_BARS if width >= WIDE else NARROW_BARS
    for least in (len("processor"), bars, 0, 0):
        table.add_column(no_wrap=True, min_width=least)

    def row(name: str, figure: str, more: str, key: str, most: float | None) -> None:
        line = history.line(key, bars, most, about.bars)
        table.add_row(name, Text(line, "cyan"), figure, Text(more, HEADING))

    busy = (
        "not measured" if now.cpu_cores is None else f"{now.cpu_cores:.1f} of {now.cores:g} cores"
    )
    row("processor", busy, f"load {now.load:.1f}", "cpu", now.cores)
    row(
        "memory", of(now.memory_bytes, now.memory_total_bytes), "", "memory", now.memory_total_bytes
    )
    read, written = rate(now.disk_read_bytes_per_s), rate(now.disk_write_bytes_per_s)
    row("disk", f"{read} read, {written} written", "", "disk", None)
    came, went = rate(now.net_in_bytes_per_s), rate(now.net_out_bytes_per_s)
    row("network", f"{came} in, {went} out", "", "network", None)
    table.add_row("space", "", f"{of(now.disk_free_bytes, now.disk_total_bytes)} free")
    return table


def _gpus(now: ServerNow, history: History, about: About, width: int) -> Table:
    wide = width >= WIDE
    bars = 0 if history.single else WIDE_BARS if wide else 8
    clock = ("CLOCK",) if wide else ()
    table = _grid("GPU", "NAME", "USE", "MEMORY", "POWER", "TEMP", *clock, "HELD BY")
    for gpu in now.gpus:
        held = ", ".join(HELD_BY.get(why, clean(why)) for why in gpu.throttle)
        table.add_row(
            gpu.index,
            Text(_short(_plain(gpu), 24 if wide else 14)),
            _use(gpu, history.line(f"gpu {gpu.index}", bars, 100.0, about.bars)),
            _fullness(gpu.memory_bytes, gpu.memory_total_bytes),
            share(gpu.power_w, gpu.power_limit_w, "W"),
            _heat(gpu),
            *((share(gpu.sm_clock_mhz, gpu.sm_clock_max_mhz, "MHz"),) if wide else ()),
            Text(_short(held, 24 if wide else 11), "red"),
        )
    return table


def _plain(gpu: GpuNow) -> str:
    """`T4`, `A100-SXM4-40GB`; an instance by its size, since its card stands above it."""
    name = gpu.name.removeprefix("NVIDIA ").removeprefix("Tesla ")
    return name[name.index("MIG ") :] if gpu.parent and "MIG " in name else name


def _use(gpu: GpuNow, line: str) -> Text:
    if gpu.parent:
        return Text("its card tells", HEADING)
    use = Text().append(line, "green")
    return use.append(f" {gpu.use_percent:3.0f} %" if gpu.use_percent is not None else "     -")


def _heat(gpu: GpuNow) -> Text:
    if gpu.temperature_c is None:
        return Text("-")
    return Text(f"{gpu.temperature_c:.0f} °C", "red" if "thermal" in gpu.throttle else "")


def _runs(now: ServerNow, history: History, about: About, width: int) -> Table:
    """What its processes hold on GPUs has no room in a narrow one: it stands beside them."""
    wide = width >= WIDE
    gpus = wide and any(process.gpus for process in now.processes)
    table = _grid("RUN", "WHO", "CORES", "MEMORY", *(("GPU MEM",) if gpus else ()), "STEPS", "LEFT")
    for run in now.runs:
        left = history.left_s(run)
        on_gpu = (_gpu_memory(p for p in now.processes if p.name == run.name),) if gpus else ()
        table.add_row(
            Text(_short(name_of(run, about.lab_id), 40 if wide else 16), "bold"),
            Text(_short(run.person, 12 if wide else 8)),
            share(run.cpu_cores, run.cores, "", ".1f"),
            _fullness(run.memory_bytes, run.memory_limit_bytes),
            *on_gpu,
            _steps(run, about.bars, 20 if wide else 6),
            span(left) if left is not None else "-",
        )
    return table


def name_of(run: RunNow | ProcessNow, lab_id: str) -> str:
    """A run of this lab by its id, another's with its lab; a service, a container by its name."""
    if run.run:
        return run.run if run.lab_id == lab_id else f"{run.lab or run.lab_id[:6]}/{run.run}"
    return f"{run.service} (service)" if run.service else run.name


def _steps(run: RunNow, bars: str, width: int) -> Text:
    if run.step is None:
        return Text("-")
    if not run.total_steps:
        return Text(f"{run.step:.0f}")
    done = round(width * min(1.0, max(0.0, run.step / run.total_steps)))
    full, empty = ("━", "─") if bars is BARS else ("#", ".")
    text = Text().append(full * done, "green")
    text.append(empty * (width - done), HEADING)
    return text.append(f" {run.step:.0f}/{run.total_steps:.0f}")


def _processes(shown: Iterable[ProcessNow], about: About, width: int) -> Table:
    gpus = any(process.gpus for process in shown)
    names = ("PID", "WHO", "IN", "CORES", "MEMORY", *(("GPU MEM",) if gpus else ()), "COMMAND")
    table = _grid(*names, last_grows=True)
    table.expand = True
    table.width = width
    for process in shown:
        inside = name_of(process, about.lab_id) if process.name else "-"
        table.add_row(
            str(process.pid),
            Text(_short(process.person, 12 if width >= WIDE else 8)),
            Text(_short(inside, 30 if width >= WIDE else 16)),
            f"{process.cpu_cores:.1f}",
            size(process.memory_bytes),
            *((_gpu_memory([process]),) if gpus else ()),
            Text(clean(process.command)),
        )
    return table


def _gpu_memory(processes: Iterable[ProcessNow]) -> str:
    found = [use.memory_bytes for process in processes for use in process.gpus]
    known = [held for held in found if held is not None]
    return size(sum(known)) if known else ("not told" if found else "-")


def _fullness(used: float | None, whole: float | None) -> Text:
    full = used is not None and whole and used / whole >= FULL
    return Text(of(used, whole, "/"), "yellow" if full else "")


def of(used: float | None, whole: float | None, between: str = " of ") -> str:
    """`3.2 of 15.5 GiB`; "-" where it was not measured."""
    if used is None:
        return "-"
    if whole is None:
        return size(used)
    said, most = size(used), size(whole)
    number, _, unit = said.rpartition(" ")
    return f"{number if most.endswith(f' {unit}') else said}{between}{most}"


def share(used: float | None, whole: float | None, unit: str, form: str = ".0f") -> str:
    """`61/70 W`; "-" where it was not measured."""
    if used is None:
        return "-"
    most = f"/{whole:g}" if whole is not None else ""
    return f"{used:{form}}{most} {unit}".rstrip()


def rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{size(bytes_per_s)}/s"


def _short(text: str, width: int) -> str:
    cleaned = clean(text).replace("\n", " ")
    return cleaned if len(cleaned) <= width else cleaned[: width - 1] + "…"
