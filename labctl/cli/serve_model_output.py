"""Output of `serve --model`: the plan, the smoke test, the load test."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from labctl.cli.exit_codes import clean
from labctl.cli.tables import print_table, wrap_text
from labctl.cli.wrapping import print_message
from labctl.shell import command
from labctl.text import bytes_text

if TYPE_CHECKING:
    from labctl.insight.load_test import LoadTest, Percentiles
    from labctl.services.language_models.endpoint import SmokeTest
    from labctl.services.language_models.serving_plan import ServingPlan

NAME_WIDTH = 10
LONGEST_ANSWER = 400
STOP = "labctl serve --stop"


def print_plan(plan: ServingPlan) -> None:
    """Print what is served, by which engine and why, and how the memory adds up."""
    _print_row("model", plan.model + ("" if plan.quantize == "none" else f", {plan.quantize}"))
    _print_row("engine", f"{plan.engine}: {plan.reason}")
    parts = [
        f"weights {bytes_text(plan.weights_bytes)}",
        f"KV cache {bytes_text(plan.kv_cache_bytes)}",
        f"working set {bytes_text(plan.working_bytes)}",
        f"overhead {bytes_text(plan.overhead_bytes)}",
    ]
    total = bytes_text(plan.total_bytes)
    of = f" of {bytes_text(plan.memory_bytes)} ({plan.memory_name})" if plan.memory_bytes else ""
    _print_row("memory", f"{' + '.join(parts)} = {total}{of}")
    most = plan.longest_context
    limit = "" if plan.context == most else f", of {most:,} that the model was made for"
    _print_row("context", f"{plan.context:,} tokens{limit}; {plan.kv_bytes_per_token:,} B a token")
    for note in plan.notes:
        _print_row("note", note)


def print_trial(trial: SmokeTest, plan: ServingPlan) -> None:
    """Print the answer of the smoke test, its speed, and the measured KV cache."""
    answer = trial.first
    text = " ".join(answer.text.split())[:LONGEST_ANSWER]
    _print_row("answer", text or "(no text)")
    speed = answer.tokens_per_second
    rate = f"{speed:,.1f} tokens per second" if speed else "too few tokens for a rate"
    _print_row("speed", f"{rate}; first token after {milliseconds(answer.first_token_s)}")
    same = "the same answer again" if trial.is_repeatable else "another answer the second time"
    _print_row("seed 0", same)
    measured = trial.kv_bytes_per_token
    found = "not reported by the engine" if measured is None else f"{measured:,.0f} B a token"
    _print_row("KV cache", f"{found}; estimated {plan.kv_bytes_per_token:,} B a token")


def print_load_test(test: LoadTest) -> None:
    """Print throughput and a table of percentiles."""
    _print_row(
        "load",
        f"{test.tokens_per_second:,.1f} tokens per second, {test.requests_per_second:,.2f} answers "
        f"per second: {test.requests:,} answers to {test.concurrency} clients in "
        f"{test.seconds:,.1f} s",
    )
    if test.failed:
        _print_row("failed", f"{test.failed:,} requests: {test.failure}")
    print_table(
        [
            _build_row("first token", test.first_token),
            _build_row("whole answer", test.latency),
            _build_row("between tokens", test.per_token),
        ],
        ("TIME", "P50", "P90", "P99"),
    )


def print_address(url: str, model: str, *, has_chat: bool) -> None:
    """Print the endpoint, and a request that works."""
    base = f"{url.rstrip('/')}/v1"
    path = "chat/completions" if has_chat else "completions"
    what = '"messages": [{"role": "user", "content": "2+2?"}]' if has_chat else '"prompt": "2+2="'
    body = f'{{"model": "{model}", {what}, "max_tokens": 50}}'
    click.echo(clean(f"endpoint  {base}"))
    header = "-H 'Content-Type: application/json'"
    click.echo(clean(f"  curl {base}/{path} {header} -d {shlex.quote(body)}"))


def print_continuation(model: str) -> None:
    """Say what still runs after the command, whose forward has ended with it."""
    call = command("labctl", "serve", "--model", model).render()
    width = max(len(call), len(STOP))
    print_message("The model is still running:")
    print_message(f"  {call:<{width}}   open its endpoint on this machine")
    print_message(f"  {STOP:<{width}}   stop it")


def milliseconds(seconds: float) -> str:
    value = seconds * 1000
    return f"{value:,.1f} ms" if value < 100 else f"{value:,.0f} ms"


def _build_row(name: str, times: Percentiles) -> tuple[str, ...]:
    return (name, milliseconds(times.p50), milliseconds(times.p90), milliseconds(times.p99))


def _print_row(name: str, text: str) -> None:
    lines = wrap_text(clean(text), NAME_WIDTH) or [""]
    click.echo(f"\n{' ' * NAME_WIDTH}".join([name.ljust(NAME_WIDTH) + lines[0], *lines[1:]]))
