"""Where a cloud's key comes from, and where the cloud is.

Both come from the environment or from the user's own files, never from lab.yaml: that file may be
somebody else's, and could send the key to another host.
"""

from __future__ import annotations

import re
from pathlib import Path

from labctl.config.directories import copy_environment, find_home
from labctl.errors import CredentialsError, UsageError
from labctl.http_client import is_confidential
from labctl.providers.http.description import CloudDescription

_SENDABLE = re.compile(r"[\x21-\x7e]+")
# `api_key = ...` or `api_key: ...`, as some tools write it, or the bare key.
_KEY_LINE = re.compile(r"(?:api_key\s*[=:]\s*)?[\"']?([\x21-\x7e]{8,512}?)[\"']?")


def find_key(cloud: CloudDescription) -> str:
    """Return the key of the environment or of the cloud's own file; "" without one."""
    environ = copy_environment()
    for name in cloud.key_variables:
        if key := environ.get(name, "").strip():
            return key
    for name in cloud.key_files:
        for line in _read_lines(find_home(environ) / name):
            if match := _KEY_LINE.fullmatch(line.strip()):
                return match[1]
    return ""


def require_key(cloud: CloudDescription) -> str:
    """Return the key; CredentialsError without one, or if no header can carry it."""
    if key := find_key(cloud):
        if not _SENDABLE.fullmatch(key):
            # The errors of the library for HTTP would show the key.
            raise CredentialsError(
                f"the {cloud.name} key is damaged",
                why="it has a space, a line break, or a character that is not ASCII",
                hint=f"{cloud.key_help}\nexport {cloud.key_variables[0]}=...",
            )
        return key
    places = [*cloud.key_variables, *(f"~/{name}" for name in cloud.key_files)]
    raise CredentialsError(
        f"no {cloud.name} key was found",
        why=f"neither in {' nor in '.join(places)}" if len(places) > 1 else f"not in {places[0]}",
        hint=f"{cloud.key_help}\nexport {cloud.key_variables[0]}=...",
    )


def resolve_endpoint(cloud: CloudDescription) -> str:
    """Return the URL before the paths; UsageError for a variable that would send the key openly."""
    url = copy_environment().get(cloud.endpoint_variable, "").rstrip("/")
    if not url:
        return cloud.endpoint
    if not is_confidential(url):
        raise UsageError(
            f"{cloud.endpoint_variable} is not an https:// address",
            why="the key would be sent without encryption",
            hint=f"unset {cloud.endpoint_variable}",
        )
    return url


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
