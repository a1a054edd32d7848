"""The page of a load test: one HTML file, in the style of the report."""

from __future__ import annotations

import time
from pathlib import Path

from labctl.insight.load_test import LoadTest, Percentiles, compute_throughput, find_percentile
from labctl.insight.report.charts import Chart, Curve, draw_chart
from labctl.insight.report.formatting import SPACE, count, date, number, span
from labctl.insight.report.page import Tile
from labctl.insight.report.render import render
from labctl.insight.report.rows import TableRow
from labctl.model import Value
from labctl.text import bytes_text

TEMPLATE = "load_test.html.j2"


class PercentileRow(Value, frozen=True):
    name: str
    p50: str
    p90: str
    p99: str


class LoadTestPage(Value, frozen=True, kw_only=True):
    lab: str
    headline: str
    lead: str
    date: str
    tiles: tuple[Tile, ...]
    rows: tuple[PercentileRow, ...]
    charts: tuple[Chart, ...]
    server: tuple[TableRow, ...]
    warning: str


class ServedFigures(Value, frozen=True, kw_only=True):
    """What the page says about the server; `measured_kv_bytes` is None if it was not measured."""

    memory: str
    context: int
    weights_bytes: int
    kv_bytes_per_token: int
    kv_cache_bytes: int
    measured_kv_bytes: float | None = None


def write_page(
    test: LoadTest, figures: ServedFigures | None, lab: str, templates: Path, out: Path
) -> int:
    """Write the page; return its size in bytes."""
    text = render(build_page(test, figures, lab), templates, TEMPLATE).encode()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(text)
    return len(text)


def build_page(test: LoadTest, figures: ServedFigures | None, lab: str) -> LoadTestPage:
    return LoadTestPage(
        lab=lab,
        headline=f"{number(test.tokens_per_second, 3)} tokens per second",
        lead=f"{test.model} on {test.engine}, asked by {count(test.concurrency, 'client')} at once "
        f"for {span(test.seconds)}.",
        date=date(time.time()),
        tiles=_build_tiles(test),
        rows=(
            _build_row("time to the first token", test.first_token),
            _build_row("time to the whole answer", test.latency),
            _build_row("time between tokens", test.per_token),
        ),
        charts=(_draw_throughput(test), _draw_latency(test)),
        server=_describe_server(figures) if figures else (),
        warning=f"{count(test.failed, 'request')} failed: {test.failure}" if test.failed else "",
    )


def milliseconds(seconds: float) -> str:
    """Write a time that may be short: 3.21 ms, 412 ms, 12,300 ms."""
    return f"{number(seconds * 1000, 3)}{SPACE}ms"


def _build_tiles(test: LoadTest) -> tuple[Tile, ...]:
    return (
        Tile(
            name="Requests",
            value=f"{test.requests:,}",
            note=f"{number(test.requests_per_second, 3)} per second",
        ),
        Tile(
            name="First token",
            value=milliseconds(test.first_token.p50),
            note="half of the requests",
        ),
        Tile(
            name="Whole answer", value=milliseconds(test.latency.p50), note="half of the requests"
        ),
        Tile(
            name="Failed",
            value=f"{test.failed:,}",
            note="of all requests" if test.failed else "none",
        ),
    )


def _build_row(name: str, times: Percentiles) -> PercentileRow:
    return PercentileRow(
        name=name,
        p50=milliseconds(times.p50),
        p90=milliseconds(times.p90),
        p99=milliseconds(times.p99),
    )


def _draw_throughput(test: LoadTest) -> Chart:
    windows = compute_throughput(test)
    curve = Curve(
        label="",
        xs=tuple(one.at_s for one in windows),
        ys=tuple(one.tokens_per_second for one in windows),
    )
    return draw_chart(
        "throughput", "Tokens per second, all clients", [curve], x_title="seconds", low=0.0
    )


def _draw_latency(test: LoadTest) -> Chart:
    """Draw the time that each share of the requests did not exceed."""
    shares = tuple(float(share) for share in range(1, 101))

    def draw(label: str, values: list[float], *, main: bool) -> Curve:
        ordered = sorted(values)
        ys = tuple(find_percentile(ordered, share / 100) * 1000 for share in shares)
        return Curve(label=label, xs=shares, ys=ys, main=main)

    curves = [
        draw("answer", [one.total_s for one in test.answers], main=True),
        draw("first token", [one.first_token_s for one in test.answers], main=False),
    ]
    return draw_chart(
        "latency", "Latency by share of requests", curves, unit="ms", x_title="%", low=0.0
    )


def _describe_server(figures: ServedFigures) -> tuple[TableRow, ...]:
    measured = figures.measured_kv_bytes
    return (
        TableRow(name="Memory", value=figures.memory or "unknown"),
        TableRow(name="Context", value=f"{figures.context:,} tokens"),
        TableRow(name="Weights", value=bytes_text(figures.weights_bytes)),
        TableRow(name="KV cache, all sequences", value=bytes_text(figures.kv_cache_bytes)),
        TableRow(name="KV cache of a token, estimated", value=f"{figures.kv_bytes_per_token:,} B"),
        TableRow(
            name="KV cache of a token, measured",
            value="not measured" if measured is None else f"{measured:,.0f} B",
        ),
    )
