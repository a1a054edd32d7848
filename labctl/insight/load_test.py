"""A load test of a served language model: several clients ask at once, for a while.

Each client asks its next question when it has its answer (a closed loop), so the number of open
requests is constant, and a slow server gets fewer of them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from labctl.errors import LabError
from labctl.model import Value
from labctl.services.language_models.endpoint import Answer, ModelEndpoint, ModelPrompt

SHARES = (0.5, 0.9, 0.99)
ANSWER_TOKENS = 64
# A server that fails this often at once is not under load: it is broken.
MOST_FAILURES = 20
# Questions differ, so that no server answers them from its cache of prompts.
QUESTION = "Story number {0}: write about a student who trains model {0}."


class Percentiles(Value, frozen=True):
    """Seconds below which this share of requests was: half, 90 and 99 of 100."""

    p50: float
    p90: float
    p99: float


class TimedAnswer(Value, frozen=True):
    """One answered request; `started_s` counts from the start of the test."""

    started_s: float
    first_token_s: float
    total_s: float
    tokens: int


class LoadTest(Value, frozen=True, kw_only=True):
    """The result. `tokens_per_second` is the sum of all clients; times are in seconds."""

    model: str
    engine: str
    concurrency: int
    seconds: float
    requests: int
    failed: int
    failure: str
    tokens: int
    tokens_per_second: float
    requests_per_second: float
    first_token: Percentiles
    latency: Percentiles
    per_token: Percentiles
    answers: tuple[TimedAnswer, ...]


def run_load_test(
    endpoint: ModelEndpoint,
    engine: str,
    seconds: float,
    concurrency: int,
    report: Callable[[float, int], None] = lambda elapsed_s, requests: None,
) -> LoadTest:
    """Ask from `concurrency` clients for `seconds`; LabError if nothing was answered.

    `report` is called after each answer. Requests that are open at the end are awaited and count.
    """
    own = [ModelEndpoint(endpoint.url, endpoint.model) for _ in range(concurrency)]
    clients = _LoadClients(endpoint.has_chat, seconds, report)
    try:
        with ThreadPoolExecutor(concurrency) as pool:
            for waiting in [pool.submit(clients.work, one) for one in own]:
                waiting.result()
    finally:
        for one in own:
            one.close()
    return summarize(
        clients.answers,
        model=endpoint.model,
        engine=engine,
        concurrency=concurrency,
        failures=clients.failures,
    )


class _LoadClients:
    """What the threads of a load test share."""

    def __init__(
        self, has_chat: bool, seconds: float, report: Callable[[float, int], None]
    ) -> None:
        self.has_chat, self.report = has_chat, report
        self.started = time.monotonic()
        self.seconds = seconds
        self.lock = threading.Lock()
        self.asked = 0
        self.answers: list[TimedAnswer] = []
        self.failures: list[str] = []

    def work(self, own: ModelEndpoint) -> None:
        """Ask until the time is over, over a connection of its own."""
        own.has_chat = self.has_chat
        while time.monotonic() - self.started < self.seconds and not self._is_broken():
            self._send_prompt(own)

    def _send_prompt(self, own: ModelEndpoint) -> None:
        with self.lock:
            self.asked += 1
            number = self.asked
        question = ModelPrompt(
            text=QUESTION.format(number), most_tokens=ANSWER_TOKENS, temperature=1.0, seed=number
        )
        started_s = time.monotonic() - self.started
        try:
            answer = own.send_prompt(question)
        except LabError as error:
            with self.lock:
                self.failures.append(error.why)
            return
        with self.lock:
            self.answers.append(_time(answer, started_s))
            count = len(self.answers)
        self.report(time.monotonic() - self.started, count)

    def _is_broken(self) -> bool:
        return len(self.failures) >= MOST_FAILURES and len(self.failures) > len(self.answers)


def _time(answer: Answer, started_s: float) -> TimedAnswer:
    return TimedAnswer(
        started_s=started_s,
        first_token_s=answer.first_token_s,
        total_s=answer.total_s,
        tokens=answer.tokens,
    )


def summarize(
    answers: Sequence[TimedAnswer],
    *,
    model: str,
    engine: str,
    concurrency: int,
    failures: Sequence[str],
) -> LoadTest:
    """Compute throughput and percentiles. Time is measured to the end of the last answer."""
    if not answers:
        raise LabError(
            "the load test got no answer",
            why=failures[0] if failures else "no request ended",
            hint="labctl serve --model MODEL --ask '2+2?'",
        )
    seconds = max(one.started_s + one.total_s for one in answers)
    tokens = sum(one.tokens for one in answers)
    gaps = [
        (one.total_s - one.first_token_s) / (one.tokens - 1) for one in answers if one.tokens > 1
    ]
    return LoadTest(
        model=model,
        engine=engine,
        concurrency=concurrency,
        seconds=seconds,
        requests=len(answers),
        failed=len(failures),
        failure=failures[0] if failures else "",
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        requests_per_second=len(answers) / seconds,
        first_token=compute_percentiles([one.first_token_s for one in answers]),
        latency=compute_percentiles([one.total_s for one in answers]),
        per_token=compute_percentiles(gaps or [0.0]),
        answers=tuple(sorted(answers, key=lambda one: one.started_s)),
    )


def compute_percentiles(values: Sequence[float]) -> Percentiles:
    p50, p90, p99 = (find_percentile(sorted(values), share) for share in SHARES)
    return Percentiles(p50=p50, p90=p90, p99=p99)


def find_percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed (nearest rank).

    Source: R. J. Hyndman, Y. Fan, The American Statistician 50 (1996) 361, definition 1.
    """
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class Window(NamedTuple):
    """Tokens per second around one moment of the test."""

    at_s: float
    tokens_per_second: float


def compute_throughput(test: LoadTest, windows: int = 30) -> tuple[Window, ...]:
    """Spread each answer's tokens over the time between its first and last; sum them by window."""
    width = test.seconds / windows
    sums = [0.0] * windows
    for one in test.answers:
        begin, end = one.started_s + one.first_token_s, one.started_s + one.total_s
        first, last = (min(windows - 1, int(at / width)) for at in (begin, end))
        if first == last:
            sums[first] += one.tokens
            continue
        for index in range(first, last + 1):
            # The last window has its end, which rounding may put behind it.
            until = end if index == last else (index + 1) * width
            sums[index] += one.tokens * (until - max(begin, index * width)) / (end - begin)
    return tuple(Window((index + 0.5) * width, total / width) for index, total in enumerate(sums))
