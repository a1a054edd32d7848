"""What a build and a pull show, from the output of both builders and of the engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from labctl.events import Event, Note, Progress, Question
from labctl.runs.build_output import (
    BuildLines,
    OutputLines,
    PullLines,
    describe_instruction,
    join_plain,
    summarize_build,
)

ROOT = Path(__file__).parents[2]
CLASSIC = """Sending build context to Docker daemon  3.072kB
Step 1/3 : FROM docker.io/library/python:3.12-slim
3.12-slim: Pulling from library/python
0123456789ab: Pulling fs layer
ba9876543210: Already exists
0123456789ab: Download complete
0123456789ab: Pull complete
Step 2/3 : RUN echo Step 9/9 : FROM nowhere
 ---> Running in 606e68297bd1
Step 3/3 : CMD ["python"]
Successfully built 92fd4407f416
"""
BUILDKIT = f"""#1 [internal] load build definition from Dockerfile
#4 [1/2] FROM docker.io/library/python:3.12@sha256:{"0" * 64}
#4 sha256:{"a" * 64} 5.24MB / 30.25MB 0.3s
#4 sha256:{"b" * 64} 500kB / 10MB 0.3s
#4 sha256:{"a" * 64} 30.25MB / 30.25MB 0.9s done
#4 extracting sha256:{"a" * 64}
#5 [train 2/2] RUN python -m pip install torch
#5 1.207 Collecting torch
#5 [train 2/2] RUN python -m pip install torch
#6 exporting to image
"""


class Events:
    """A Reporter that keeps what it gets."""

    def __init__(self) -> None:
        self.shown: list[tuple[float, float, str]] = []
        self.notes: list[str] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, Progress):
            self.shown.append((event.done, event.total, event.detail))
        elif isinstance(event, Note):
            self.notes.append(event.text)

    def confirm(self, decision: Question) -> bool:
        raise AssertionError(decision)


def feed(kind: type[OutputLines], text: str, size: int = 7) -> Events:
    events = Events()
    lines = kind(events, "building the image")
    data = text.encode()
    for start in range(0, len(data), size):
        lines.feed(data[start : start + size])
    return events


def test_the_classic_builder() -> None:
    events = feed(BuildLines, CLASSIC)
    base = "step 1 of 3, getting python:3.12-slim"
    assert events.shown == [
        (0, 3, base),
        (0, 3, f"{base}, 0 of 1 layers"),
        (0, 3, f"{base}, 1 of 2 layers"),
        (0, 3, f"{base}, 2 of 2 layers"),
        (1, 3, "step 2 of 3, running echo"),
        (2, 3, "step 3 of 3, setting options of the image"),
        (3, 3, "storing the image"),
    ]
    assert events.notes[1] == "step 2 of 3: running echo"


def test_buildkit() -> None:
    events = feed(BuildLines, BUILDKIT)
    assert events.shown == [
        (0, 2, "step 1 of 2, getting python:3.12"),
        (0, 2, "step 1 of 2, getting python:3.12, 5 of 30 MB"),
        (0, 2, "step 1 of 2, getting python:3.12, 6 of 40 MB"),
        (0, 2, "step 1 of 2, getting python:3.12, 31 of 40 MB"),
        (1, 2, "step 2 of 2, installing Python packages"),
        (1, 2, "step 2 of 2, installing Python packages: torch"),
        (2, 2, "storing the image"),
    ]
    assert len(events.notes) == 2, "a line that BuildKit repeats is shown once"


@pytest.mark.parametrize("prefix", ["", "#9 412.7 "])
def test_a_long_installation_names_the_package_that_pip_has_come_to(prefix: str) -> None:
    pip = (
        "Collecting nvidia-cublas-cu12==12.1.3.1 (from torch)",
        "  Downloading torch-2.4.1-cp311-cp311-manylinux1_x86_64.whl.metadata (26 kB)",
        "  Downloading https://example.org/whl/torch-2.4.1%2Bcu121-linux_x86_64.whl (797.1 MB)",
        "     ━━━━━━━━━━━━━━━━ 797.1/797.1 MB 3.3 MB/s eta 0:00:00",
        "  Building wheel for antlr4-python3-runtime (setup.py): started",
        "Installing collected packages: mpmath, torch",
    )
    lines = ["Step 2/3 : RUN pip install -r requirements.txt", *(prefix + line for line in pip)]
    events = feed(BuildLines, "\n".join([*lines, ""]))
    step = "step 2 of 3, installing Python packages"
    assert [detail for _, _, detail in events.shown] == [
        step,
        f"{step}: nvidia-cublas-cu12",
        f"{step}: torch (797.1 MB)",
        f"{step}: building antlr4-python3-runtime",
        f"{step}: unpacking 2 packages",
    ]
    assert len(events.notes) == 1, "without a terminal, one line a step"


def test_the_layers_of_a_pull() -> None:
    assert feed(PullLines, CLASSIC).shown == [
        (0, 1, "0 of 1 layers"),
        (1, 2, "1 of 2 layers"),
        (2, 2, "2 of 2 layers"),
    ]


@pytest.mark.parametrize(
    ("instruction", "words"),
    [
        ("FROM --platform=linux/amd64 nvcr.io/nvidia/pytorch:25.01 AS base", "pytorch:25.01"),
        ("FROM ${BASE}", "getting the base image"),
        ("RUN --mount=type=cache,target=/c pip install -r x.txt", "installing Python packages"),
        ("RUN set -eu; if ! python3 -c 'import venv'; then apt-get update; fi", "system packages"),
        ("RUN uv sync --frozen", "installing Python packages"),
        ("RUN pip --version && apt-get install -y git", "installing system packages"),
        ("RUN micromamba create -f environment.yml", "installing conda packages"),
        ("RUN curl -LO https://example.org/x && make -j", "downloading files"),
        ("RUN set -eu; python3 -m venv /opt/venv", "creating a Python environment"),
        ("RUN --mount=type=cache,target=/c /opt/setup/prepare.sh now", "running prepare.sh"),
        ('RUN ["python", "setup.py"]', "running a command"),
        ("RUN", "running a command"),
        ("copy . /lab", "copying files"),
        ("ENV A=1", "setting options of the image"),
    ],
)
def test_an_instruction_in_words(instruction: str, words: str) -> None:
    assert describe_instruction(instruction).endswith(words)


@pytest.mark.parametrize(
    ("line", "what", "setting"),
    [
        (
            'Get "https://registry-1.docker.io/v2/": dial tcp: lookup registry-1.docker.io',
            "the container registry",
            "LABCTL_BASE_IMAGE",
        ),
        (
            "WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by 'x'",
            "the package index",
            "LABCTL_WHEELHOUSE or LABCTL_PACKAGE_INDEX",
        ),
    ],
)
def test_what_a_server_cannot_reach_is_named_with_its_setting(
    line: str, what: str, setting: str
) -> None:
    summary = summarize_build([line, "the last line"]).splitlines()
    assert ("Retrying" in line) == (line not in summary)
    assert f"the server cannot reach {what}; to build without it, set {setting}" in summary
    assert summarize_build(["the last line"]) == "the last line"


def test_a_base_image_that_the_dockerfile_does_not_use_is_named() -> None:
    lines = [
        " ---> Running in 0123456789ab",
        "     ━━━━━━━╸━━━━━━━━ 7.1/7.1 MB 444.1 MB/s eta 0:00:00",
        'Get "https://registry-1.docker.io/v2/": no such host',
    ]
    summary = summarize_build(lines, "labctl-base:bookworm").splitlines()
    assert summary[0] == lines[2]
    assert "to build without it" not in "".join(summary)
    assert summary[-1].endswith("In the Dockerfile, write ARG BASE=IMAGE and FROM ${BASE}")


def test_the_colors_of_a_terminal_are_left_out() -> None:
    assert join_plain(["\x1b[91mE: no space\x1b[0m", "left\r"]) == "E: no space\nleft"


SCRIPT = "set -eu;     export A=1;     if ! uv pip install x; then         echo no;     fi; exit 1"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (f"Step 11/19 : RUN {SCRIPT}", "step 11 of 19: installing Python packages"),
        (f"#8 [7/9] RUN {SCRIPT}", "step 7 of 9: installing Python packages"),
        (
            f"The command '/bin/sh -c {SCRIPT}' returned a non-zero code: 1",
            "installing Python packages failed with exit code 1",
        ),
        (
            f'#8 ERROR: process "/bin/sh -c {SCRIPT}" did not complete successfully: exit code: 2',
            "installing Python packages failed with exit code 2",
        ),
        (
            "The command '/bin/sh -c make' returned a non-zero code: 2",
            "make failed with exit code 2",
        ),
        ("Step 2/19 : RUN make", "step 2 of 19: RUN make"),
        (f"error: {SCRIPT}", f"error: {SCRIPT}"),
    ],
)
def test_a_failed_instruction_is_in_words_and_the_reason_as_it_is(line: str, shown: str) -> None:
    assert summarize_build([line, "why"]) == f"{shown}\nwhy"


OWN_DOCKERFILES = [
    "images/environment/pip.Dockerfile",
    "images/environment/conda.Dockerfile",
    "images/services/Dockerfile",
    "templates/image-classifier/Dockerfile",
]


@pytest.mark.parametrize("name", OWN_DOCKERFILES)
def test_a_failure_of_labctls_own_dockerfiles_shows_no_shell(name: str) -> None:
    """Each RUN of them, as both builders write it when it fails."""
    text = (ROOT / name).read_text()
    commands = [
        command.replace("\\\n", "")
        for command in re.findall(r"^RUN ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    ]
    assert len(commands) == text.count("\nRUN ")
    for command in commands:
        lines = [
            f"Step 3/9 : RUN {command}",
            f"The command '/bin/sh -c {command}' returned a non-zero code: 1",
        ]
        step, failed = summarize_build(lines).splitlines()
        action = step.removeprefix("step 3 of 9: ")
        assert action.startswith(("installing ", "creating ")), action
        assert failed == f"{action} failed with exit code 1"
