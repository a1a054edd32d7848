"""Progress of `docker build` and `docker pull`, from their output, in words for people.

The output is meant for a log and has no other form that every version of Docker offers. Nothing is
decided by it: what is not recognized is not shown, and the log on the server has all of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from labctl.events import Note, Progress, Reporter
from labctl.lazy import lazy_imports
from labctl.text import count_text

with lazy_imports(__name__):
    from rich import text as rich_text

# The classic builder, and BuildKit with the name of a stage in front of the number.
STEP = re.compile(r"^(?:Step (\d+)/(\d+) : (.*)|#\d+ \[[^\]]*?(\d+)/(\d+)\] (.*))")
EXPORT = re.compile(r"^(?:#\d+ exporting to |Successfully built )")
# A layer in the output of the engine, and of BuildKit with its bytes.
LAYER = re.compile(r"^([0-9a-f]{12}): (Pulling fs layer|Already exists|Pull complete)$")
LAYER_BYTES = re.compile(r"^#\d+ (sha256:[0-9a-f]{64}) ([\d.]+)([kMG]?B) / ([\d.]+)([kMG]?B)")
# What pip does now, behind the clock that BuildKit puts in front.
PIP = re.compile(
    r"^(?:#\d+ [\d.]+ )?\s*(?:Collecting (?P<wanted>[\w.-]+)"
    r"|Downloading (?:\S+/)?(?P<file>[\w.-]+?)-\d\S*\.(?:whl|gz|zip) \((?P<size>[\d.]+ \w+)\)"
    r"|Building wheel for (?P<built>[\w.-]+)"
    r"|Installing collected packages: (?P<all>.+))"
)
# The failed instruction as Docker repeats it after its output, and its exit code.
FAILED = re.compile(
    r"(?:The command '|.*\bprocess \")(?:/bin/sh -c )?(?P<text>.*)"
    r"(?:' returned a non-zero code: |\" did not complete successfully: exit code: )(?P<code>\d+)"
)
# characters of an instruction that a message shows as it is
INSTRUCTION_CHARS = 50
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
# What a RUN does. The first line that matches counts: it takes the longest.
_ACTIONS = (
    (r"\b(?:pip[\d.]*|uv|poetry)\s+(?:-\S+\s+)*(?:install|sync)\b", "installing Python packages"),
    (r"\b(?:conda|mamba|micromamba)\b", "installing conda packages"),
    (r"\b(?:apt-get|apt|apk|dnf|yum|microdnf|zypper)\b", "installing system packages"),
    (r"\b(?:npm|yarn|pnpm)\b", "installing Node packages"),
    (r"\b(?:git clone|curl|wget)\b", "downloading files"),
    (r"\b(?:make|cmake|ninja|gcc|g\+\+|nvcc|cargo|go) ", "compiling"),
    (r"-m venv\b|\bvirtualenv\b|\buv venv\b", "creating a Python environment"),
    (r"\b(?:useradd|adduser|groupadd|usermod)\b", "creating a user"),
    (r"\bpython[\d.]*\s", "running Python"),
)


# pip repeats this for each try, before the error that counts
_PIP_RETRY = re.compile(r"WARNING: Retrying \(Retry\(")
# That, the classic builder's line about its container, and pip's progress bars
_NOISE = re.compile(rf"{_PIP_RETRY.pattern}| ---> Running in |\s*[━╸╺]+ ")
# what pip prints if it cannot reach the package index
_INDEX_UNREACHABLE = re.compile(rf"{_PIP_RETRY.pattern}|Could not fetch URL")
# What the output of a failed build says if the server cannot reach what the build needs, the name
# of that, and the setting that replaces it.
_UNREACHABLE = (
    (
        re.compile(r'Get "https?://[^"]*/v2/|failed to resolve source metadata'),
        "the container registry",
        "LABCTL_BASE_IMAGE",
    ),
    (
        _INDEX_UNREACHABLE,
        "the package index",
        "LABCTL_WHEELHOUSE or LABCTL_PACKAGE_INDEX",
    ),
)


def join_plain(lines: Sequence[str]) -> str:
    """Join lines of a program's output, without the colors that it has for a terminal."""
    return "\n".join(rich_text.Text.from_ansi(line.rstrip("\r")).plain for line in lines)


def is_index_unreachable(lines: Sequence[str]) -> bool:
    """Whether the output of a failed build says that the server cannot reach the package index."""
    return bool(_INDEX_UNREACHABLE.search(join_plain(lines)))


def summarize_build(lines: Sequence[str], base_image: str = "") -> str:
    """Join the last lines of a failed build, and add what the server could not reach.

    `base_image` is the setting of this machine. It replaces only the build argument BASE.

    Docker repeats the failed instruction before and after its output. A long one hides the reason,
    so it is described; pip's retries are left out.
    """
    text = join_plain(lines)
    shown = [_shorten_instruction(line) for line in text.split("\n") if not _NOISE.match(line)]
    if base_image and _UNREACHABLE[0][0].search(text):
        shown.append("the server cannot reach the container registry, and this FROM does not use")
        shown.append("LABCTL_BASE_IMAGE. In the Dockerfile, write ARG BASE=IMAGE and FROM ${BASE}")
        return "\n".join(shown)
    for pattern, what, setting in _UNREACHABLE:
        if pattern.search(text):
            shown.append(f"the server cannot reach {what}; to build without it, set {setting}")
            shown.append("(see labctl docs images: Without Docker Hub or PyPI)")
    return "\n".join(shown)


def _shorten_instruction(line: str) -> str:
    """Describe the instruction in a line of a builder: the step, or the step that failed."""
    if match := STEP.match(line):
        place = f"step {match[1] or match[4]} of {match[2] or match[5]}"
        return f"{place}: {_shorten(match[3] or match[6])}"
    if match := FAILED.fullmatch(line):
        return f"{_shorten(match['text'])} failed with exit code {match['code']}"
    return line


def _shorten(instruction: str) -> str:
    """Return a short instruction as it is, and say what a long one does."""
    if len(instruction) <= INSTRUCTION_CHARS:
        return instruction
    return describe_instruction(re.sub(r"^(?![A-Z]+ )", "RUN ", instruction))


class OutputLines:
    """Takes a program's output in pieces of any size, and reads it line by line."""

    def __init__(self, reporter: Reporter, name: str) -> None:
        self._reporter = reporter
        self._name = name
        self._rest = b""

    def feed(self, block: bytes) -> None:
        *lines, self._rest = (self._rest + block).split(b"\n")
        for line in lines:
            self.read_line(line.decode(errors="replace").rstrip("\r"))

    def read_line(self, line: str) -> None:
        raise NotImplementedError

    def _show(self, done: int, total: int, detail: str) -> None:
        event = Progress(name=self._name, done=done, total=total, unit="steps", detail=detail)
        self._reporter.emit(event)


class BuildLines(OutputLines):
    """Reports each step of a build that begins, and the layers of the image that it starts from."""

    def __init__(self, reporter: Reporter, name: str) -> None:
        super().__init__(reporter, name)
        self._step, self._total, self._action = 0, 0, ""
        self._layers = Layers()

    def read_line(self, line: str) -> None:
        if match := STEP.match(line):
            step, total = int(match[1] or match[4]), int(match[2] or match[5])
            action = describe_instruction(match[3] or match[6])
            if (step, total, action) == (self._step, self._total, self._action):
                return  # BuildKit repeats the line when it continues a step
            self._step, self._total, self._action = step, total, action
            self._layers = Layers()
            self._show(step - 1, total, f"step {step} of {total}, {action}")
            self._reporter.emit(Note(text=f"step {step} of {total}: {action}", level="detail"))
        elif EXPORT.match(line) and self._total:
            self._show(self._total, self._total, "storing the image")
        elif self._layers.read_line(line):
            detail = f"step {self._step} of {self._total}, {self._action}, {self._layers.text}"
            self._show(max(self._step - 1, 0), self._total, detail)
        elif self._step and (package := describe_pip_line(line)):
            # A build of many minutes looks like one that hangs without it.
            detail = f"step {self._step} of {self._total}, {self._action}: {package}"
            self._show(self._step - 1, self._total, detail)


class PullLines(OutputLines):
    """Reports the layers of an image that the engine pulls."""

    def __init__(self, reporter: Reporter, name: str) -> None:
        super().__init__(reporter, name)
        self._layers = Layers()

    def read_line(self, line: str) -> None:
        if self._layers.read_line(line):
            self._show(self._layers.done, self._layers.total, self._layers.text)


class Layers:
    """The layers of an image on their way to the server."""

    def __init__(self) -> None:
        self._complete: dict[str, bool] = {}
        self._bytes: dict[str, tuple[float, float]] = {}

    @property
    def done(self) -> int:
        return sum(self._complete.values())

    @property
    def total(self) -> int:
        return len(self._complete)

    @property
    def text(self) -> str:
        if self._complete:
            return f"{self.done} of {self.total} layers"
        here, size = (sum(column) / 10**6 for column in zip(*self._bytes.values(), strict=True))
        return f"{here:.0f} of {size:.0f} MB"

    def read_line(self, line: str) -> bool:
        """Note what a line says; return whether it is about a layer."""
        if match := LAYER.match(line):
            self._complete[match[1]] = match[2] != "Pulling fs layer"
        elif match := LAYER_BYTES.match(line):
            here, size = float(match[2]) * _UNITS[match[3]], float(match[4]) * _UNITS[match[5]]
            self._bytes[match[1]] = here, size
        return match is not None


def describe_pip_line(line: str) -> str:
    """Say which package pip has come to; "" for a line that names none."""
    match = PIP.match(line)
    if match is None:
        return ""
    if match["all"]:
        return f"unpacking {count_text(len(match['all'].split(', ')), 'package')}"
    if match["file"]:
        return f"{match['file']} ({match['size']})"
    return match["wanted"] or f"building {match['built']}"


def describe_instruction(text: str) -> str:
    """Say in words what an instruction of a Dockerfile does."""
    keyword, _, rest = text.strip().partition(" ")
    match keyword.upper():
        case "FROM":
            image = next((word for word in rest.split() if not word.startswith("--")), "")
            if "$" in image:  # an argument of the build
                return "getting the base image"
            return f"getting {image.partition('@')[0].rpartition('/')[2]}"
        case "RUN":
            return describe_command(rest)
        case "COPY" | "ADD":
            return "copying files"
    return "setting options of the image"


def describe_command(line: str) -> str:
    """Say in words what a RUN does, or name its first program."""
    for pattern, action in _ACTIONS:
        if re.search(pattern, line):
            return action
    words = [word for word in line.split() if not word.startswith(("-", "set"))]
    program = next((word for word in words if re.fullmatch(r"[\w./+-]+", word)), "")
    return f"running {program.rpartition('/')[2]}" if program else "running a command"
