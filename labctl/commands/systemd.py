"""The systemd user units of keepers: `labctl keep`, `labctl course serve`. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

UNIT = "labctl-keep"


def keep_unit(words: Sequence[str], *, path: str) -> str:
    """Build the unit of `labctl keep`. `words` is the command, `path` a PATH that contains ssh.

    It limits the service as far as a user's own systemd can without namespaces, which many login
    nodes do not allow: no new privileges, and little memory (`labctl keep` takes 40 MB, the
    processes of a recovery some hundred more).
    """
    description = "labctl keep: recovers, mirrors and cleans up the labs that were exported to it"
    return _build_unit(description, words, path, "keep.env")


def course_unit(words: Sequence[str], course: str, *, path: str) -> str:
    """Build the unit of a course's keeper, with a settings file of its own."""
    description = f"labctl course serve: the keeper of {course}"
    return _build_unit(description, words, path, "course.env")


def _build_unit(description: str, words: Sequence[str], path: str, environment: str) -> str:
    return f"""\
[Unit]
Description={description}
StartLimitIntervalSec=0

[Service]
ExecStart={" ".join(_quote(word) for word in words)}
Environment={_quote(f"PATH={path}")}
# The keeper's own settings and credentials, such as AWS_PROFILE=..., one NAME=value a line:
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


def _quote(word: str) -> str:
    """Quote a word for systemd, so that `%`, `$`, quotes and backslashes are literal."""
    plain = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{plain}"'
