"""Numbers that make no sense: each option names its range and an example."""

from __future__ import annotations

from typing import Any

import pytest

MODEL = ("serve", "--model", "Qwen/Qwen2.5-0.5B")
ESTIMATE = ("estimate", "--params", "8B")
HUGE = "1" + "0" * 30


@pytest.mark.parametrize("number", ["0", "-1", "x", HUGE])
@pytest.mark.parametrize(
    ("words", "option"),
    [
        ((*ESTIMATE, "--serve"), "--replicas"),
        ((*ESTIMATE, "--train", "adam"), "--data-parallel"),
        ((*ESTIMATE, "--train", "adam"), "--tensor-parallel"),
        ((*ESTIMATE, "--train", "adam"), "--pipeline-parallel"),
        ((*ESTIMATE, "--train", "adam"), "--accumulate"),
        ((*ESTIMATE, "--train", "adam"), "--epochs"),
        (MODEL, "--context"),
        ((*MODEL, "--load-test", "1s"), "--concurrency"),
        (("serve",), "--batch"),
        (("serve", "--image", "x"), "--port"),
        (("sweep", "--param", "lr=1,2"), "--trials"),
        (("sweep", "--param", "lr=1,2"), "--parallel"),
    ],
)
def test_a_count_out_of_range_is_refused(
    labctl: Any, words: tuple[str, ...], option: str, number: str
) -> None:
    result = labctl(*words, option, number)
    assert result.code == 2
    message = " ".join(result.err.split())
    assert f"{option} is not valid '{number}' is not a whole number from 1" in message
    assert f"for example: {option} " in message


@pytest.mark.parametrize("number", ["-1", "65536", "http"])
@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("serve",), "--local-port"),
        (("forward", "tensorboard"), "--port"),
        (("profile",), "--port"),
    ],
)
def test_a_port_out_of_range_is_refused(
    labctl: Any, words: tuple[str, ...], option: str, number: str
) -> None:
    result = labctl(*words, option, number)
    assert result.code == 2
    assert "is not a whole number from 0 to 65535" in " ".join(result.err.split())


def test_more_replicas_than_can_be_given_are_not_suggested(labctl: Any) -> None:
    words = ("estimate", "--params", "8B", "--serve", "--price", "1", "--replicas", "2")
    load = ("--seconds-per-request", "7", "--requests-per-day")
    assert "too few: use --replicas " in labctl(*words, *load, "100k").out
    assert "2 replicas are too few." in labctl(*words, *load, "1e15").out
