"""Conversations with an OpenAI-compatible server: one answer, and how fast it came.

The server streams events (`data: {...}`) as OpenAI's API reference describes; of each, only the
text and the counts are used. What it sends is not trusted: sizes are bounded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import msgspec

from labctl.decoding import decode_json
from labctl.errors import LabError
from labctl.lazy import lazy_imports
from labctl.model import Value

if TYPE_CHECKING:
    from requests import Response, Session

with lazy_imports(__name__):
    import requests

LARGEST_EVENT_BYTES = 1024**2
MOST_SLOTS = 256
LONGEST_ANSWER = 1024**2
CONNECT_S, READ_S = 10, 300
# What llama.cpp answers while it loads the model.
LOADING, POLL_S = 503, 0.5
# seconds in which ollama may download a model
FETCH_S = 3600
LOG_HINT = "labctl serve --stop && labctl serve --model MODEL"
Count = Annotated[int, msgspec.Meta(ge=0, le=10**9)]


class Answer(Value, frozen=True, kw_only=True):
    """One answer. Times are in seconds; `tokens` were generated after the first came.

    `tokens_per_second` counts from the first token on; None if there were fewer than two.
    """

    text: str
    tokens: int
    prompt_tokens: int
    first_token_s: float
    total_s: float

    @property
    def tokens_per_second(self) -> float | None:
        seconds = self.total_s - self.first_token_s
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else None


class _Delta(Value, frozen=True):
    content: str | None = None


class _AnswerChoice(Value, frozen=True):
    delta: _Delta = _Delta()
    text: str | None = None


class _Usage(Value, frozen=True):
    prompt_tokens: Count = 0
    completion_tokens: Count = 0


class _AnswerEvent(Value, frozen=True):
    choices: tuple[_AnswerChoice, ...] = ()
    usage: _Usage | None = None


class _ListedModel(Value, frozen=True):
    id: Annotated[str, msgspec.Meta(max_length=1000)]


class _Models(Value, frozen=True):
    data: tuple[_ListedModel, ...] = ()


class _Saved(Value, frozen=True):
    n_saved: Count
    n_written: Annotated[int, msgspec.Meta(ge=0, le=10**15)]


class ModelPrompt(Value, frozen=True, kw_only=True):
    """A question with a fixed seed; temperature 0 is the most probable answer."""

    text: str
    most_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0


class ModelEndpoint:
    """An OpenAI-compatible server at a local port, which may load its model for `loading_s`."""

    def __init__(self, url: str, model: str = "", loading_s: float = 0.0) -> None:
        self.url, self.loading_s = url.rstrip("/"), loading_s
        self.session: Session = requests.Session()
        self.session.trust_env = False  # no proxy leads to this machine
        self.model = model or self._find_model()
        self.has_chat = True

    def close(self) -> None:
        self.session.close()

    def _find_model(self) -> str:
        """Return the name of the first model that the server offers, once it is loaded."""
        deadline = time.monotonic() + self.loading_s
        try:
            while True:
                with self.session.get(
                    f"{self.url}/v1/models", timeout=(CONNECT_S, READ_S)
                ) as reply:
                    if reply.status_code == LOADING and time.monotonic() < deadline:
                        time.sleep(POLL_S)
                        continue
                    reply.raise_for_status()
                    models = decode_json(reply.content, _Models).data
                    break
        except (requests.RequestException, msgspec.MsgspecError) as error:
            raise make_silence_error(error) from None
        if not models:
            raise make_silence_error("its list of models is empty")
        return models[0].id

    def send_prompt(self, question: ModelPrompt) -> Answer:
        """Ask once, and read the answer as it is generated; LabError if the server fails.

        A model without a chat template completes the text of the question instead.
        """
        started = time.monotonic()
        try:
            if self.has_chat:
                with self._post("chat/completions", question) as reply:
                    if reply.status_code < 400:
                        return _read_answer(reply, started)
                    # A base model has no template for conversations: every server refuses then.
                    self.has_chat = reply.status_code >= 500
                    if self.has_chat:
                        reply.raise_for_status()
            started = time.monotonic()
            with self._post("completions", question) as reply:
                reply.raise_for_status()
                return _read_answer(reply, started)
        except (requests.RequestException, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise make_silence_error(error) from None

    def _post(self, path: str, question: ModelPrompt) -> Response:
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": question.most_tokens,
            "temperature": question.temperature,
            "seed": question.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if path == "completions":
            body["prompt"] = question.text
        else:
            body["messages"] = [{"role": "user", "content": question.text}]
        return self.session.post(
            f"{self.url}/v1/{path}", json=body, stream=True, timeout=(CONNECT_S, READ_S)
        )

    def measure_cache(self) -> float | None:
        """Return the bytes that one token takes in the KV cache; None if the server does not say.

        llama.cpp writes the cache of a sequence to a file and reports its size. The file has the
        tokens too, four bytes each, and a header of some 200 bytes.
        """
        for slot in range(MOST_SLOTS):
            try:
                with self.session.post(
                    f"{self.url}/slots/{slot}?action=save",
                    json={"filename": "measured"},
                    timeout=(CONNECT_S, READ_S),
                ) as reply:
                    if reply.status_code != 200:
                        return None
                    saved = decode_json(reply.content, _Saved)
            except (requests.RequestException, msgspec.MsgspecError):
                return None
            if saved.n_saved:  # a sequence that nobody has used is empty
                return saved.n_written / saved.n_saved - 4
        return None


class SmokeTest(Value, frozen=True, kw_only=True):
    """A smoke test: the same question twice with the same seed, and the cache of one token.

    `kv_bytes_per_token` is None where the engine does not report it.
    """

    first: Answer
    is_repeatable: bool
    kv_bytes_per_token: float | None


def try_model(endpoint: ModelEndpoint, question: str) -> SmokeTest:
    """Ask a question twice; LabError if the model does not answer.

    The speed is that of the second answer: the first one may load or compile something.
    """
    asked = ModelPrompt(text=question)
    first, second = endpoint.send_prompt(asked), endpoint.send_prompt(asked)
    return SmokeTest(
        first=second,
        is_repeatable=first.text == second.text,
        kv_bytes_per_token=endpoint.measure_cache(),
    )


def fetch_ollama_model(url: str, name: str) -> None:
    """Have ollama download a model, which it does not do by itself; LabError if it fails."""
    try:
        with requests.Session() as session:
            session.trust_env = False
            body = {"model": name, "stream": False}
            with session.post(
                f"{url.rstrip('/')}/api/pull", json=body, timeout=(CONNECT_S, FETCH_S)
            ) as reply:
                reply.raise_for_status()
    except requests.RequestException as error:
        raise make_silence_error(error) from None


def _read_answer(reply: Response, started: float) -> Answer:
    parts: list[str] = []
    first, size, usage = 0.0, 0, _Usage()
    for event in _read_events(reply):
        usage = event.usage or usage
        for choice in event.choices[:1]:
            text = choice.delta.content or choice.text or ""
            if text:
                first = first or time.monotonic()
                parts.append(text)
                size += len(text)
        if size > LONGEST_ANSWER:
            raise msgspec.ValidationError("the answer does not end")
    ended = time.monotonic()
    return Answer(
        text="".join(parts),
        # An event is a token in these servers; their own count has those that are not text.
        tokens=usage.completion_tokens or len(parts),
        prompt_tokens=usage.prompt_tokens,
        first_token_s=(first or ended) - started,
        total_s=ended - started,
    )


def _read_events(reply: Response) -> Iterator[_AnswerEvent]:
    """Yield the events of a stream as they arrive; msgspec.ValidationError for a too long one."""
    pending = b""
    for block in reply.iter_content(chunk_size=None):
        *lines, pending = (pending + block).split(b"\n")
        if len(pending) > LARGEST_EVENT_BYTES:
            raise msgspec.ValidationError("an event is larger than 1 MiB")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield decode_json(data, _AnswerEvent)


def make_silence_error(reason: object) -> LabError:
    return LabError(
        "the language model does not answer as OpenAI's API describes",
        why=str(reason)[:1000],
        hint="labctl ssh -- docker logs LAB-svc-serve-model\n" + LOG_HINT,
    )
