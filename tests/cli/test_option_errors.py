"""What labctl says of an option that is in the wrong place or has a wrong value."""

from __future__ import annotations

from typing import Any

import pytest


def test_an_option_for_all_commands_behind_one_says_where_it_belongs(labctl: Any) -> None:
    said = labctl("push", "-C", "digits", "--force")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("labctl: -C comes before the command\n")
    assert said.err.endswith("  next: labctl -C digits push --force\n")
    assert labctl("push", "-C").err.endswith("  next: labctl -C DIR push\n")


@pytest.mark.parametrize(
    ("words", "what", "why", "hint"),
    [
        (
            "up --nosuch",
            "labctl up has no option --nosuch",
            "usage: labctl up [OPTIONS]",
            "labctl up --help",
        ),
        (
            "top --serv=1 --json",
            "labctl top has no option --serv; did you mean --server?",
            "usage: labctl top [OPTIONS]",
            "labctl top --server=1 --json",
        ),
        ("up --gpu", "--gpu needs a value", "", "labctl up --help\n        (describes --gpu)"),
        (
            "up --arch foo",
            "--arch is not valid",
            "'foo' is not one of 'x86_64', 'arm64'",
            "labctl up --help\n        (describes --arch)",
        ),
        (
            "cp x",
            "labctl cp needs TARGET",
            "usage: labctl cp [OPTIONS] SOURCE TARGET",
            "labctl cp --help",
        ),
        (
            "pull a b",
            "labctl pull: got unexpected extra argument (b)",
            "usage: labctl pull [OPTIONS] [RUN]",
            "labctl pull --help",
        ),
        (
            "course plam x",
            "there is no command 'course plam'; did you mean plan?",
            "",
            "labctl course plan x",
        ),
    ],
)
def test_a_wrong_command_line_has_the_three_parts_of_every_error(
    labctl: Any, words: str, what: str, why: str, hint: str
) -> None:
    output = labctl(*words.split())
    reason = f"  {why}\n" if why else ""
    assert output.err == f"labctl: {what}\n{reason}  next: {hint}\n"
    assert (output.code, output.out) == (2, "")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("logs -n abc", "'abc' is not a whole number of at least 1; for example: -n 50"),
        ("logs -n 0", "'0' is not a whole number of at least 1; for example: -n 50"),
        ("top --server x", "'x' is not a whole number of at least 0; for example: --server 1"),
        ("ssh --at-once 999", "'999' is not a whole number from 1 to 256; for example: --at-once"),
    ],
)
def test_a_wrong_number_shows_the_option_with_a_right_one(
    labctl: Any, words: str, problem: str
) -> None:
    said = labctl(*words.split())
    assert said.code in (2, 255)
    assert problem in said.err


@pytest.mark.parametrize(
    ("words", "corrected"),
    [
        ("up --gpu T4 --provider loca --yes", "labctl up --gpu T4 --provider local --yes"),
        ("offers --provider=loca --spot only", "labctl offers --provider=local --spot only"),
        ("-C . orphans --provider loca", "labctl -C . orphans --provider local"),
        ("up --provider no-cloud-of-this-name", "labctl up --help"),
    ],
)
def test_a_mistyped_provider_is_corrected_in_the_whole_command(
    labctl: Any, words: str, corrected: str
) -> None:
    output = labctl(*words.split())
    assert output.code == 2
    assert "labctl: --provider is not valid\n" in output.err
    assert f"  next: {corrected}\n" in output.err
