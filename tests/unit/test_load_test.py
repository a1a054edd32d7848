"""The load test of a language model: percentiles, throughput, hostile answers, and its page."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from labctl.errors import LabError
from labctl.insight.load_test import (
    LoadTest,
    TimedAnswer,
    compute_percentiles,
    compute_throughput,
    find_percentile,
    run_load_test,
    summarize,
)
from labctl.insight.load_test_page import ServedFigures, write_page
from labctl.services.language_models.endpoint import ModelEndpoint, ModelPrompt, try_model

TEMPLATES = Path(__file__).parents[2] / "templates" / "report"


def made(answers: list[TimedAnswer], **more: str) -> LoadTest:
    return summarize(
        answers, model=more.get("model", "tiny"), engine="llama.cpp", concurrency=2, failures=()
    )


def test_percentiles_are_measured_values() -> None:
    hundred = [float(value) for value in range(1, 101)]
    assert [find_percentile(hundred, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert find_percentile([7.0], 0.5) == find_percentile([7.0], 0.99) == 7.0
    three = compute_percentiles([3.0, 1.0, 2.0])
    assert (three.p50, three.p90, three.p99) == (2.0, 3.0, 3.0)


def test_throughput_adds_up_to_the_tokens() -> None:
    test = made([TimedAnswer(0.0, 0.5, 2.5, 20), TimedAnswer(1.0, 1.0, 3.0, 40)])
    assert test.seconds == 4.0
    assert test.tokens_per_second == 15.0
    assert test.per_token.p50 == pytest.approx(2 / 39)
    windows = compute_throughput(test, windows=8)
    assert sum(one.tokens_per_second for one in windows) * 0.5 == pytest.approx(60)
    # The first half second is before the first token.
    assert windows[0].tokens_per_second == 0
    assert windows[-1].tokens_per_second == pytest.approx(20)


def test_a_single_short_answer_has_a_result() -> None:
    test = made([TimedAnswer(0.0, 0.2, 0.2, 1)])
    assert (test.per_token.p50, test.tokens) == (0.0, 1)
    assert sum(one.tokens_per_second for one in compute_throughput(test)) > 0


def test_nothing_answered_is_an_error_with_the_reason() -> None:
    with pytest.raises(LabError, match="got no answer") as failed:
        summarize([], model="m", engine="e", concurrency=1, failures=["503 busy"])
    assert failed.value.why == "503 busy"


def test_the_page_escapes_the_names_of_strangers(tmp_path: Path) -> None:
    test = made([TimedAnswer(0.0, 0.1, 1.0, 5)], model="<script>alert(1)</script>\u202e")
    out = tmp_path / "deep" / "page.html"
    figures = ServedFigures(
        memory="<b>L4</b>", context=8192, weights_bytes=10**9, kv_bytes_per_token=131072,
        kv_cache_bytes=2**30,
    )  # fmt: skip
    assert write_page(test, figures, "digits", TEMPLATES, out) == out.stat().st_size
    text = out.read_text()
    assert "<script" not in text
    assert "<b>L4" not in text
    assert "\u202e" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "tokens per second" in text
    assert "not measured" in text
    assert "http://" not in text.replace("http://www.w3.org", "")


class Speaker:
    """What a server streams as its answer, and how it answers conversations."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.has_chat = True
        self.status = 200
        self.asked: list[dict[str, object]] = []


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def piece(text: str) -> bytes:
    return event(choices=[{"delta": {"content": text}}])


@pytest.fixture
def speaker() -> Iterator[tuple[Speaker, str]]:
    """A server that streams a prepared answer: engines cannot be made to send damaged ones."""
    known = Speaker()

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, b'{"data": [{"id": "tiny", "other": 1}]}')

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if "/slots/" in self.path:
                self._send(200, b'{"n_saved": 10, "n_written": 1320}')
                return
            known.asked.append(json.loads(body))
            if "chat" in self.path and not known.has_chat:
                self._send(400, b'{"error": "no chat template"}')
                return
            self.send_response(known.status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in [*known.events, b"data: [DONE]\n\n"]:
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                self.wfile.flush()
                time.sleep(0.002)
            self.wfile.write(b"0\r\n\r\n")

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield known, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_an_answer_is_timed_and_counted(speaker: tuple[Speaker, str]) -> None:
    known, url = speaker
    usage = {"prompt_tokens": 7, "completion_tokens": 4}
    known.events = [piece("4"), piece(" is"), b": comment\n\n", event(choices=[], usage=usage)]
    endpoint = ModelEndpoint(url)
    answer = endpoint.send_prompt(ModelPrompt(text="2+2?"))
    assert (endpoint.model, answer.text, answer.tokens, answer.prompt_tokens) == (
        "tiny",
        "4 is",
        4,
        7,
    )
    assert 0 < answer.first_token_s < answer.total_s
    assert answer.tokens_per_second
    assert known.asked[0]["seed"] == 0
    trial = try_model(endpoint, "2+2?")
    assert trial.is_repeatable
    assert trial.kv_bytes_per_token == 128
    endpoint.close()


def test_a_model_without_a_chat_template_completes_text(speaker: tuple[Speaker, str]) -> None:
    known, url = speaker
    known.has_chat, known.events = False, [event(choices=[{"text": "four"}])]
    endpoint = ModelEndpoint(url)
    assert endpoint.send_prompt(ModelPrompt(text="2+2=")).text == "four"
    assert endpoint.send_prompt(ModelPrompt(text="2+2=")).text == "four"
    assert [("prompt" in asked) for asked in known.asked] == [False, True, True]
    endpoint.close()


@pytest.mark.parametrize(
    "events",
    [
        [b"data: {\n\n"],
        [b"data: []\n\n"],
        [b'data: {"choices": [{"delta": {"content": 5}}]}\n\n'],
        [b'data: {"usage": {"completion_tokens": -1}}\n\n'],
        [b"data: " + b"x" * 600_000, b"x" * 600_000],
        [piece("x" * 600_000), piece("x" * 600_000)],
        [b"data: " + b"[" * 100_000 + b"\n\n"],
    ],
)
def test_a_damaged_answer_is_an_error(speaker: tuple[Speaker, str], events: list[bytes]) -> None:
    known, url = speaker
    known.events = events
    endpoint = ModelEndpoint(url)
    with pytest.raises(LabError, match="does not answer as OpenAI's API describes"):
        endpoint.send_prompt(ModelPrompt(text="2+2?"))
    endpoint.close()


def test_clients_ask_at_once_until_the_time_is_over(speaker: tuple[Speaker, str]) -> None:
    known, url = speaker
    known.events = [piece("a"), piece("b")]
    endpoint = ModelEndpoint(url)
    counts: list[int] = []
    test = run_load_test(endpoint, "vllm", 0.3, 3, lambda elapsed_s, count: counts.append(count))
    assert test.requests == len(known.asked) == max(counts)
    assert test.failed == 0
    assert len({asked["seed"] for asked in known.asked}) == test.requests
    assert max(one.started_s for one in test.answers) < 0.35
    known.status = 500
    with pytest.raises(LabError, match="got no answer"):
        run_load_test(endpoint, "vllm", 30, 3)
    endpoint.close()
