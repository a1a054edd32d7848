"""The speed-up on several GPUs: a curve for each way to exchange gradients, and a table."""

from __future__ import annotations

from labctl.insight.report.charts import Chart, Curve, draw_chart
from labctl.insight.report.formatting import SPACE, count, number, size
from labctl.insight.speedup import Speedup
from labctl.model import Value

# What fits beside the chart.
LONGEST_LABEL = 14


class SpeedupRow(Value, frozen=True):
    variant: str
    processes: str
    time: str
    sent: str
    speedup: str


class SpeedupPart(Value, frozen=True):
    """The report's part on the speed-up. Without several processes there is no chart."""

    chart: Chart | None
    rows: tuple[SpeedupRow, ...]
    note: str


def describe_speedup(speedup: Speedup) -> SpeedupPart:
    """Draw the curves, and list the measured steps with their speed-ups."""
    rows = tuple(
        SpeedupRow(
            variant=row.variant,
            processes=f"{row.processes:,}",
            time=f"{number(row.seconds_per_step * 1000, 3)}{SPACE}ms",
            sent=size(row.bytes_per_step),
            speedup=number(speedup.alone_s / row.seconds_per_step, 3),
        )
        for row in speedup.rows
    )
    return SpeedupPart(chart=_draw(speedup), rows=rows, note=_describe_measurement(speedup))


def _describe_measurement(speedup: Speedup) -> str:
    where = " with ".join(filter(None, [speedup.device, speedup.backend]))
    parts = [f"Measured on {where}." if where else ""]
    if speedup.batch_size:
        parts.append(f"Together, the processes compute {count(speedup.batch_size, 'item')} a step.")
    parts.append("Speed-up is the time of one process divided by the time of all.")
    return " ".join(filter(None, parts))


def _draw(speedup: Speedup) -> Chart | None:
    several = [row for row in speedup.rows if row.processes > 1]
    if not several:
        return None
    curves: list[Curve] = []
    for variant in dict.fromkeys(row.variant for row in several):
        seconds = {row.processes: row.seconds_per_step for row in several if row.variant == variant}
        xs = (1, *sorted(seconds))
        ys = (1.0, *(speedup.alone_s / seconds[x] for x in xs[1:]))
        label = variant if len(variant) <= LONGEST_LABEL else f"{variant[: LONGEST_LABEL - 1]}…"
        curves.append(Curve(label=label, xs=tuple(map(float, xs)), ys=ys, main=not curves))
    most = float(max(row.processes for row in several))
    return draw_chart(
        "speedup",
        "Speed-up",
        curves,
        x_title="processes",
        low=0.0,
        reference=Curve(label="ideal", xs=(1.0, most), ys=(1.0, most)),
    )
