"""Calls about several servers at once, sent as one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from aws_cloud import REGION, Cloud
from aws_provider import a_request, an_offer, provider, with_market

from labctl.errors import LabError, ThrottledError
from labctl.providers.aws.request_batcher import RequestBatcher


class Slow:
    """Answers with the id itself, as soon as it is let."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.entered = threading.Event()
        self.go = threading.Event()

    def __call__(self, ids: list[str]) -> dict[str, str]:
        self.batches.append(ids)
        self.entered.set()
        assert self.go.wait(120)
        return {item: item.upper() for item in ids if item != "nobody"}


def test_one_caller_waits_for_nobody() -> None:
    asked: list[list[str]] = []

    def ask(ids: list[str]) -> dict[str, str]:
        asked.append(ids)
        return {"a": "A"}

    together = RequestBatcher(ask)
    assert together.call("a") == "A"
    assert together.call("b") is None
    assert asked == [["a"], ["b"]]


def test_whoever_comes_during_a_call_goes_with_the_next() -> None:
    slow = Slow()
    together = RequestBatcher(slow)
    with ThreadPoolExecutor(31) as threads:
        first = threads.submit(together.call, "first")
        assert slow.entered.wait(120)
        names = [f"n{number}" for number in range(28)] + ["nobody", "n0"]
        rest = [threads.submit(together.call, name) for name in names]
        while len(together._waiting) < 29:
            threading.Event().wait(0.01)
        slow.go.set()
        assert first.result() == "FIRST"
        assert [one.result() for one in rest] == [
            None if name == "nobody" else name.upper() for name in names
        ]
    assert slow.batches[0] == ["first"]
    assert sorted(slow.batches[1]) == sorted(set(names))
    assert len(slow.batches) == 2


def test_error_reaches_everyone_who_asked_with_it_and_nobody_later() -> None:
    answers = [ThrottledError("too often"), {"a": "A"}]

    def ask(ids: list[str]) -> dict[str, str]:
        answer = answers.pop(0)
        if isinstance(answer, LabError):
            raise answer
        return answer

    together = RequestBatcher(ask)
    with pytest.raises(ThrottledError):
        together.call("a")
    assert together.call("a") == "A"


def test_ctrl_c_in_a_call_leaves_the_next_one_free() -> None:
    interrupted = [True]

    def ask(ids: list[str]) -> dict[str, str]:
        if interrupted:
            interrupted.clear()
            raise KeyboardInterrupt
        return {"a": "A"}

    together = RequestBatcher(ask)
    with pytest.raises(KeyboardInterrupt):
        together.call("a")
    assert together.call("a") == "A"


def test_servers_of_a_class_are_found_and_ended_in_few_calls(cloud: Cloud, tmp_path: Path) -> None:
    with_market(cloud)
    aws = provider(tmp_path)
    request = a_request(aws, tmp_path)
    ids = [
        aws.create(an_offer(), msgspec.structs.replace(request, token=f"token-{number}")).id
        for number in range(12)
    ]
    unknown = f"i-0123456789abcdef0.{REGION}"
    cloud.seen.clear()
    with ThreadPoolExecutor(13) as threads:
        found = list(threads.map(aws.find, [*ids, unknown]))
    assert [server.id if server else None for server in found] == [*ids, None]
    assert cloud.seen["DescribeInstances"] <= 6
    with ThreadPoolExecutor(13) as threads:
        list(threads.map(aws.terminate, [*ids, unknown]))
    assert aws.servers() == []
