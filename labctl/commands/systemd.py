"""The systemd user units of keepers: `labctl keep`, `labctl course serve`. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

UNIT = "labctl-keep"


def keep_unit(words: Sequence[str], *, path: str) -> str:
    """The unit's text. `words` is the command, `path` the PATH in which ssh is found.

    What a user's own systemd can hold a service to without namespaces, which many login nodes do
    not allow: no new privileges, and little memory (`labctl keep` takes 40 MB, what it starts for
    a recovery some hundred more).
    """
    said = "labctl keep: recovers, mirrors and sweeps the labs that were handed to it"
    return _unit(said, words, path, "keep.env")


def course_unit(words: Sequence[str], course: str, *, path: str) -> str:
    """The unit's text of a course's keeper; its settings and credentials lie beside the others'."""
    said = f"labctl course serve: the keeper of {course}"
    return _unit(said, words, path, "course.env")


def _unit(said: str, words: Sequence[str], path: str, environment: str) -> str:
    return f"""\
[Unit]
Description={said}
StartLimitIntervalSec=0

[Service]
ExecStart={" ".join(_quoted(word) for word in words)}
Environment={_quoted(f"PATH={path}")}
# Settings and credentials of its own, such as AWS_PROFILE=..., one NAME=value a line:
EnvironmentFile=-%h/.config/labctl/{environment}
Restart=always
RestartSec=5
KillMode=mixed
TimeoutStopSec=15
UMask=0077
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
MemoryMax=1G
TasksMax=512

[Install]
WantedBy=default.target
"""


def _quoted(word: str) -> str:
    """A word as systemd reads it: `%`, `$`, quotes and backslashes mean themselves."""
    plain = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{plain}"'
