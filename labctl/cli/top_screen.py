"""The screen of `top`: one picture of the server from its history, for any width and height."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from labctl.cli.exit_codes import clean
from labctl.cli.top_history import BARS, History
from labctl.insight.top import ContainerMetrics, GpuMetrics, ProcessMetrics, ServerMetrics
from labctl.model import Server, Value
from labctl.text import bytes_text, duration_text, price_or_free_text

# columns from which the wide layout is used, and below which the tables have no bars
WIDE, NARROW = 120, 80
NARROW_BARS, WIDE_BARS = 16, 36
# fewer bars say too little
LEAST_BARS = 8
# widest name, figure and note of the machine: the layout stays the same while figures change
_NAME_WIDTH = len("processor")
_FIGURE_WIDTH = len("1023 KiB/s read, 1023 KiB/s written")
_NOTE_WIDTH = len("max 1023 KiB/s")
# characters that the command of a process keeps before columns are left out
_COMMAND_WIDTH = 16
LEAST_PROCESSES = 3
HEADING = "dim"
GPU_HEADINGS = ("GPU", "NAME", "USE", "MEMORY", "POWER", "TEMP", "CLOCK", "HELD BY")
# those that a narrow terminal leaves out, in this order
GPU_OPTIONAL = ("CLOCK", "POWER", "NAME", "HELD BY", "TEMP")
# the headings of containers, in their order
KINDS = ("RUN", "SERVICE", "CONTAINER")
# memory used, as a share of its total, from which it is shown as a warning
FULL = 0.95
# of the runs' table, if a process uses a GPU
GPU_MEMORY_COLUMN = 4
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
    lines = 7 if width >= _NAME_WIDTH + 2 + _FIGURE_WIDTH else 9
    if now.gpus:
        above += [Text(), _render_gpus(now, history, about, width)]
        lines += 2 + len(now.gpus)
    if now.runs:
        runs = _render_runs(now, history, about, width)
        above += [Text(), runs]
        lines += 2 + runs.row_count
    free_lines = height - lines - 3 - (1 if about.foot or about.cut else 0)
    processes = now.processes[: max(LEAST_PROCESSES, free_lines)] if height else now.processes
    if processes:
        above += [Text(), _render_processes(processes, about, width)]
    foot = Text(clean(about.cut), "yellow") if about.cut else Text(about.foot, HEADING)
    return Group(*above, *([Text(), foot] if foot else []))


def _render_head(now: ServerMetrics, about: About, width: int) -> Text:
    """Render alias, facts and clock: the facts that fit, the price above all."""
    server = about.server
    offer = server.offer
    clock = time.strftime("%H:%M:%S", time.localtime(now.at))
    facts = [f"up {duration_text(now.at - server.created_at)}"]
    facts.append(price_or_free_text(offer.price_usd_per_hour))
    place = " ".join(filter(None, (server.provider, offer.type, offer.zone)))
    alias, room = clean(server.alias), width - len(clock) - 2
    choices = ([place, *facts], [offer.type, *facts] if offer.type else facts, facts, facts[1:])
    texts = (f"  {clean(', '.join(choice))}" for choice in choices)
    text = Text().append(alias, "bold")
    text.append(next((one for one in texts if text.cell_len + cell_len(one) <= room), ""))
    text.truncate(max(8, room), overflow="ellipsis")
    text.append(clock.rjust(max(1, width - text.cell_len)), HEADING)
    return text


def make_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[Text]],
    width: int,
    optional: Sequence[str] = (),
    *,
    last_grows: bool = False,
) -> Table:
    """Make a table without the `optional` columns, in this order, that `width` has no room for.

    With `last_grows`, the last column has what the others leave, but at least _COMMAND_WIDTH.
    """
    widths = [max(cell.cell_len for cell in column) for column in zip(*rows, strict=True)]
    widths = [max(len(heading), w) for heading, w in zip(headings, widths, strict=True)]
    if last_grows:
        widths[-1] = min(widths[-1], _COMMAND_WIDTH)
    kept = list(range(len(headings)))
    for name in optional:
        if sum(widths[index] + 2 for index in kept) - 2 <= width:
            break
        kept = [index for index in kept if headings[index] != name]
    table = _make_grid(width if last_grows else None, header=True)
    for index in kept:
        grows = last_grows and index == len(headings) - 1
        table.add_column(
            headings[index], no_wrap=True, overflow="ellipsis", ratio=1 if grows else None
        )
    for row in rows:
        table.add_row(*(row[index] for index in kept))
    return table


def _make_grid(width: int | None = None, *, header: bool = False) -> Table:
    """Make a table without columns and lines. With a `width`, it has exactly that."""
    return Table(
        box=None,
        show_header=header,
        header_style=HEADING,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        width=width,
    )


def _render_machine(now: ServerMetrics, history: History, about: About, width: int) -> Table:
    has_notes = width >= NARROW
    others = _NAME_WIDTH + 2 + _FIGURE_WIDTH + 2 + (_NOTE_WIDTH + 2 if has_notes else 0)
    bars = min(WIDE_BARS if width >= WIDE else NARROW_BARS, width - others)
    if history.is_single_sample or bars < LEAST_BARS:
        bars = 0
    table = _make_grid()
    table.add_column(no_wrap=True, min_width=_NAME_WIDTH)
    if bars:
        table.add_column(no_wrap=True, min_width=bars)
    table.add_column()  # folded at a space in a very narrow terminal
    if has_notes:
        table.add_column(no_wrap=True)

    def add_row(name: str, figure: str, note: str, key: str, maximum: float | None) -> None:
        line = history.render_line(key, bars, maximum, about.bars) if key else ""
        cells = [Text(line, "cyan")] if bars else []
        table.add_row(name, *cells, figure, *([Text(note, HEADING)] if has_notes else []))

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
    add_row("space", f"{amount_text(now.disk_free_bytes, now.disk_total_bytes)} free", "", "", None)
    return table


def _render_gpus(now: ServerMetrics, history: History, about: About, width: int) -> Table:
    rows = [make_gpu_row(gpu, history, about.bars, width) for gpu in now.gpus]
    return make_table(GPU_HEADINGS, rows, width, GPU_OPTIONAL)


def make_gpu_row(gpu: GpuMetrics, history: History, bars: str, width: int) -> tuple[Text, ...]:
    """Make the cells below GPU_HEADINGS."""
    wide = width >= WIDE
    count = 0 if history.is_single_sample or width < NARROW else WIDE_BARS if wide else LEAST_BARS
    return (
        Text(gpu.index),
        Text(shorten(_gpu_name(gpu), 24 if wide else 14)),
        _gpu_use_text(gpu, history.render_line(f"gpu {gpu.index}", count, 100.0, bars)),
        memory_text(gpu.memory_bytes, gpu.memory_total_bytes),
        Text(usage_text(gpu.power_w, gpu.power_limit_w, "W")),
        _temperature_text(gpu),
        Text(usage_text(gpu.sm_clock_mhz, gpu.sm_clock_max_mhz, "MHz")),
        Text(shorten(_describe_throttling(gpu), 24 if wide else 11), "red"),
    )


def _describe_throttling(gpu: GpuMetrics) -> str:
    return ", ".join(HELD_BY.get(why, clean(why)) for why in gpu.throttle)


def _gpu_name(gpu: GpuMetrics) -> str:
    """Return `T4`, `A100-SXM4-40GB`, or for a MIG instance its size: its card is the row above."""
    name = gpu.name.removeprefix("NVIDIA ").removeprefix("Tesla ")
    return name[name.index("MIG ") :] if gpu.parent and "MIG " in name else name


def _gpu_use_text(gpu: GpuMetrics, line: str) -> Text:
    if gpu.parent:
        return Text("see its card", HEADING)
    use = Text().append(f"{line} " if line else "", "green")
    return use.append(f"{gpu.use_percent:3.0f}%" if gpu.use_percent is not None else "   -")


def _temperature_text(gpu: GpuMetrics) -> Text:
    if gpu.temperature_c is None:
        return Text("-")
    return Text(f"{gpu.temperature_c:.0f} °C", "red" if "thermal" in gpu.throttle else "")


def _render_runs(now: ServerMetrics, history: History, about: About, width: int) -> Table:
    """Render the runs, and services and other containers below headings of their own."""
    groups = {kind: [one for one in now.runs if _find_kind(one) == kind] for kind in KINDS}
    kinds = [kind for kind in KINDS if groups[kind]]
    has_gpus = any(process.gpus for process in now.processes)
    headings = [kinds[0], "WHO", "CORES", "MEMORY", "STEPS", "LEFT"]
    if has_gpus:
        headings.insert(GPU_MEMORY_COLUMN, "GPU MEM")
    empty = [Text()] * (len(headings) - 1)
    rows: list[Sequence[Text]] = []
    for kind in kinds:
        if rows:
            rows.append([Text(kind, HEADING), *empty])
        for run in groups[kind]:
            row = list(make_run_row(run, history, about.lab_id, about.bars, width))
            if has_gpus:
                processes = (one for one in now.processes if one.name == run.name)
                row.insert(GPU_MEMORY_COLUMN, Text(_gpu_memory(processes)))
            rows.append(row)
    return make_table(headings, rows, width, ("GPU MEM", "CORES", "WHO", "MEMORY", "LEFT"))


def _find_kind(container: ContainerMetrics) -> str:
    run, service, other = KINDS
    return run if container.run else service if container.service else other


def make_run_row(
    run: ContainerMetrics, history: History, lab_id: str, bars: str, width: int
) -> tuple[Text, ...]:
    """Make the cells below RUN, WHO, CORES, MEMORY, STEPS and LEFT."""
    left = history.estimate_left_s(run)
    count = 20 if width >= WIDE else 6 if width >= NARROW else 0
    return (
        Text(shorten(name_container(run, lab_id), 40 if width >= WIDE else 16), "bold"),
        Text(shorten(run.person, 12 if width >= WIDE else 8)),
        Text(usage_text(run.cpu_cores, run.cores, "", ".1f")),
        memory_text(run.memory_bytes, run.memory_limit_bytes),
        steps_text(run, bars, count),
        Text(duration_text(left) if left is not None else "-"),
    )


def name_container(run: ContainerMetrics | ProcessMetrics, lab_id: str) -> str:
    """Name a run by its id, with its lab if that is another; a service or container by its name."""
    if run.run:
        return run.run if run.lab_id == lab_id else f"{run.lab or run.lab_id[:6]}/{run.run}"
    return run.service or run.name


def steps_text(run: ContainerMetrics, bars: str, width: int) -> Text:
    if run.step is None:
        return Text("-")
    if not run.total_steps:
        return Text(f"{run.step:.0f}")
    done = round(width * min(1.0, max(0.0, run.step / run.total_steps)))
    full, empty = ("━", "─") if bars is BARS else ("#", ".")
    text = Text().append(full * done, "green").append(empty * (width - done), HEADING)
    return text.append(f"{' ' if width else ''}{run.step:.0f}/{run.total_steps:.0f}")


def _render_processes(processes: Sequence[ProcessMetrics], about: About, width: int) -> Table:
    wide = width >= WIDE
    has_gpus = any(process.gpus for process in processes)
    gpu_heading = ("GPU MEM",) if has_gpus else ()
    headings = ("PID", "WHO", "IN", "CORES", "MEMORY", *gpu_heading, "COMMAND")
    rows = [
        (
            Text(str(process.pid)),
            Text(shorten(process.person, 12 if wide else 8)),
            Text(_name_place(process, about.lab_id, 30 if wide else 16)),
            Text(f"{process.cpu_cores:.1f}"),
            Text(bytes_text(process.memory_bytes)),
            *((Text(_gpu_memory([process])),) if has_gpus else ()),
            Text(clean(process.command)),
        )
        for process in processes
    ]
    return make_table(headings, rows, width, ("IN", "WHO", "MEMORY", "CORES"), last_grows=True)


def _name_place(process: ProcessMetrics, lab_id: str, width: int) -> str:
    """Name what the process is part of; mark a service as such if there is room."""
    name = name_container(process, lab_id) if process.name else "-"
    marked = f"{name} (service)" if process.service else name
    return shorten(marked if len(marked) <= width else name, width)


def _gpu_memory(processes: Iterable[ProcessMetrics]) -> str:
    amounts = [use.memory_bytes for process in processes for use in process.gpus]
    known = [amount for amount in amounts if amount is not None]
    return bytes_text(sum(known)) if known else ("unknown" if amounts else "-")


def memory_text(used: float | None, total: float | None) -> Text:
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


def shorten(text: str, width: int) -> str:
    cleaned = clean(text).replace("\n", " ")
    return cleaned if len(cleaned) <= width else cleaned[: width - 1] + "…"
