"""The report of `labctl doctor`, a text without secrets for a question to the maintainers.

Only checks whose details come from labctl itself are quoted. In those, known values and everything
with the form of a key, an account, an address or a person is masked.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from labctl.cli.exit_codes import clean
from labctl.config import copy_environment, find_paths, find_user_name
from labctl.model import Check
from labctl.submissions.leaks import SHAPES
from labctl.text import next_lines

# Checks whose details have no names that people chose. "permission" and "quota" begin names.
QUOTED = re.compile(
    "labctl|ssh|rsync|disk|clock|Docker Engine|cgroup|disk for images|lab server image|lab|lab.yaml"
    "|keeper here|(aws )?credentials|permissions?.*|offers|image and network|quota .*"
)
# Checks whose names may be shown; the others are names of machines and people.
NAMED = re.compile(
    f"{QUOTED.pattern}|keeper|server|provider.*|address|deadline at AWS|instance profile"
)
SECRET_NAMES = re.compile(
    "(?i)SECRET|TOKEN|PASS|CREDENTIAL|KEY|PRIVATE|AUTH|ACCOUNT|PROFILE|COOKIE|SESSION|USER|HOST"
)
# Values of lab.yaml that a reader needs and that identify nobody. As texts they may also occur in
# versions: image.python "3.11" in Python 3.11.7.
PLAIN_KEYS = {
    *("arch", "cpus", "gpu", "gpu_memory", "idle", "max_ttl", "memory", "mirror", "provider"),
    *("python", "shm", "spot", "ttl", "work"),
}
# Shorter values occur by chance.
SHORTEST = 4
PUBLIC_HOSTS = r"checkip\.amazonaws\.com|docs\.docker\.com|docker\.io|time\.apple\.com"
FORMS = (
    (r"arn:[\w-]*:\S+", "<arn>"),
    (r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}\b", "<key>"),
    (r"(?<![\w/+])(?=\S*\d)(?=\S*[A-Z])(?=\S*[a-z])[\w/+=-]{32,}", "<token>"),
    (r"\b[0-9a-fA-F]{24,}\b", "<token>"),
    (r"\b\d{12}\b|\b\d{4}-\d{4}-\d{4}\b", "<account>"),
    (r"[\w.+-]+@[\w.-]+", "<user@host>"),
    (r"\b(?:i|ami|vpc|subnet|sg|vol|eni)-[0-9a-f]{8,}\b", "<id>"),
    (r"\b\d{1,3}(?:\.\d{1,3}){3}\b", "<address>"),
    (r"(?i)(?<![\w:])(?:[0-9a-f]{0,4}:){2,}[0-9a-f:]*", "<address>"),
    (r"/(?:home|Users)/[^/\s]+", "~"),
    (
        rf"(?i)(?<![\w.-])(?!(?:{PUBLIC_HOSTS})\b)(?:[a-z][\w-]*\.)+"
        r"(?:com|org|net|edu|gov|info|local|lan|internal|example|cloud|dev|ai|io|[a-z]{2})\b"
        r"(?<!\.md)(?<!\.py)",
        "<host>",
    ),
)


def build_report(checks: Sequence[Check], lab_dir: Path) -> str:
    """Return the report as text. `lab_dir` is the lab's directory, whose lab.yaml has names."""
    known = sorted(set(_list_known_values(lab_dir)), key=len, reverse=True)
    lines = ["labctl doctor --report", ""]
    for check in checks:
        name = check.name if NAMED.fullmatch(check.name) else "<name>"
        quoted = QUOTED.fullmatch(check.name) is not None
        detail = check.detail if quoted else "(detail left out)"
        lines.append(f"{_state(check):<8} {name}: {detail}")
        if check.next and quoted:
            lines += [f"{'':<6} {line}" for line in next_lines(check.next)]
    return "\n".join(mask(clean(line), known) for line in lines) + "\n"


def mask(text: str, known: Iterable[str]) -> str:
    """Replace the `known` values, and everything with the form of a secret or a name."""
    for value in known:
        text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", "<masked>", text)
    for shape in SHAPES:
        text = re.sub(shape.pattern, "<secret>", text)
    for form, replacement in FORMS:
        text = re.sub(form, replacement, text)
    return text


def _state(check: Check) -> str:
    if check.skipped:
        return "skipped"
    if not check.ok:
        return "error"
    return "warning" if check.warning else "ok"


def _list_known_values(lab_dir: Path) -> list[str]:
    """List names of the machine and user, secrets in the environment, and lab.yaml's values."""
    environ = copy_environment()
    paths = find_paths(environ)
    values = [str(paths.home), paths.home.name, find_user_name(), socket.gethostname()]
    values += [value for name, value in environ.items() if SECRET_NAMES.search(name)]
    for file in (lab_dir / "lab.yaml", paths.config_file):
        try:
            values += _list_texts(yaml.safe_load(file.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
            continue  # a file that cannot be read is quoted nowhere
    return [value for value in values if len(value) >= SHORTEST]


def _list_texts(node: Any) -> list[str]:
    if isinstance(node, Mapping):
        inner = [value for key, value in node.items() if key not in PLAIN_KEYS]
        return [text for value in inner for text in _list_texts(value)]
    if isinstance(node, list):
        return [text for value in node for text in _list_texts(value)]
    return [] if node is None or isinstance(node, bool) else [str(node)]
