"""Where a lab's files are: parsers of directories, buckets, addresses and stores in lab.yaml."""

from __future__ import annotations

import os
import re

from labctl.config.document import quote
from labctl.wire.containment import is_contained
from labctl.wire.server_paths import describe_problem

# prefix of a data set that is already on the server
ON_SERVER = "server:"

# Patterns are compiled at their first use: that takes longer than to import this module.
_SSH_STORE = (
    r"ssh://(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9._+-]*)@)?(?P<host>[A-Za-z0-9_][A-Za-z0-9._-]*)"
    r"(?::(?P<port>[0-9]{1,5}))?/(?P<place>[A-Za-z0-9._+@~/-]*[A-Za-z0-9._+@~-])/?"
)
_GIT = (
    r"(?P<address>(?:https|ssh)://[A-Za-z0-9_][A-Za-z0-9._~+@:/%-]*|file:///[^\0-\x20]+)"
    r"@(?P<commit>[0-9a-f]{40})"
)
_BUCKET = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
_GOOGLE_BUCKET = r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"


def parse_inside(text: str) -> str:
    """Parse a path below some directory and normalize it: never absolute, never above it."""
    if not text or text.startswith("-") or "\n" in text:
        raise ValueError(f"{quote(text)} is not a path")
    path = os.path.normpath(text)
    if path.startswith("~") or not (path == "." or is_contained(path)):
        raise ValueError(f"{quote(text)} is outside the lab; give a path inside it")
    return path


def parse_template(text: str) -> str:
    """Parse where a starter comes from: a template's name, a directory, or git with a commit."""
    if "://" not in text:
        return parse_inside(text)
    if parse_git_address(text) is None:
        form = "write https://host/repository.git@COMMIT, with the 40 hex digits of a commit"
        raise ValueError(f"{quote(text)} is not a git address with a commit: {form}")
    return text


def parse_git_address(text: str) -> tuple[str, str] | None:
    """Split `https://host/repository.git@COMMIT` (also ssh:// and file://); None if it is not."""
    match = re.fullmatch(_GIT, text)
    if match is None or re.match(r"https://[^/]*@", text):  # a password would be handed out
        return None
    return match["address"], match["commit"]


def parse_source(text: str) -> str:
    """Parse the source of a data set: a directory, server:/path, https://, s3:// or gs://."""
    if text.startswith(ON_SERVER):
        return parse_server_directory(text)
    scheme, separator, rest = text.partition("://")
    if not separator:
        if text.startswith("/") or text == "~" or text.startswith("~/"):
            return os.path.normpath(text)
        return parse_inside(text)
    if scheme == "s3":
        return parse_bucket(text)
    if scheme == "gs":
        return parse_bucket(text, "gs", _GOOGLE_BUCKET)
    if scheme != "https":
        known = "a directory, server:/path, https://, s3:// or gs://"
        raise ValueError(f"{quote(text)}: expected {known}, got {quote(scheme)}")
    host = re.split("[/?#]", rest)[0]
    if not re.fullmatch(r"[A-Za-z0-9.-]+(:[0-9]{1,5})?", host) or re.search(r"\s", rest):
        raise ValueError(f"{quote(text)} is not an address without a user and without spaces")
    return text


def parse_server_directory(text: str) -> str:
    """Parse `server:/datasets/imagenet`; return it without a trailing slash."""
    path = text.removeprefix(ON_SERVER)
    path = path.rstrip("/") or path[:1]
    if problem := describe_problem(path):
        raise ValueError(f"{quote(text)} cannot be data: {problem}")
    return ON_SERVER + path


def parse_bucket(text: str, scheme: str = "s3", name: str = _BUCKET) -> str:
    """Parse `s3://bucket/prefix`; return it without a trailing slash."""
    bucket, _, prefix = text.removeprefix(f"{scheme}://").partition("/")
    parts = prefix.rstrip("/").split("/")
    if not text.startswith(f"{scheme}://") or not re.fullmatch(name, bucket):
        raise ValueError(f"{quote(text)} is not a bucket: write {scheme}://bucket/folder")
    if re.search(r"\s", prefix) or ".." in parts or "" in parts[:-1]:
        raise ValueError(f"{quote(text)}: the folder may not contain spaces, `..` or `//`")
    return text.rstrip("/")


def parse_store(text: str) -> str:
    """Parse a store: `s3://bucket/prefix`, or `ssh://[user@]host[:port]/directory`.

    A directory that starts with `/~/` is below the home directory there.
    """
    if not text.startswith("ssh://"):
        return parse_bucket(text)
    match = re.fullmatch(_SSH_STORE, text)
    if match is None or ".." in text.split("/"):
        form = "write ssh://user@host:22/directory, with only letters, digits and ._+@~-"
        raise ValueError(f"{quote(text)} is not a directory on an SSH server: {form}")
    if match["port"] and not 0 < int(match["port"]) < 65536:
        raise ValueError(f"{quote(text)}: ports go from 1 to 65535")
    return text.rstrip("/")


def parse_place(text: str) -> str:
    """Parse a directory on this machine: absolute or below the home directory."""
    if not text.startswith(("/", "~/")):
        raise ValueError(f"{quote(text)}: give the full path, starting with / or ~/")
    return os.path.normpath(text)
