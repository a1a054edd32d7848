"""Which account and region AWS's own configuration means, read without AWS's own library.

That library takes a quarter of a second to import, and answers from the cache need none of it.
"""

from __future__ import annotations

import configparser
import hashlib
from collections.abc import Mapping
from pathlib import Path

DEFAULT_REGION = "us-east-1"


def profile_name(profile: str, environ: Mapping[str, str]) -> str:
    """The profile whose credentials AWS's library takes; "" where they come from elsewhere."""
    if profile:
        return profile
    if environ.get("AWS_ACCESS_KEY_ID"):
        return ""  # the library prefers these to AWS_PROFILE
    if named := environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE"):
        return named
    files = (_config_file(environ), _credentials_file(environ))
    return "default" if any(path.is_file() for path in files) else ""


def home_region(profile: str, environ: Mapping[str, str]) -> str:
    """The region that `aws` would use: from the environment, else the profile, else us-east-1."""
    for variable in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        if environ.get(variable):
            return environ[variable]
    name = profile or environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE") or "default"
    parser = configparser.RawConfigParser()
    try:
        parser.read(_config_file(environ), encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        # The library itself says what is wrong there, as soon as it is needed.
        return DEFAULT_REGION
    for section in (f"profile {name}", name):
        if parser.has_option(section, "region"):
            return parser.get(section, "region").strip() or DEFAULT_REGION
    return DEFAULT_REGION


def fingerprint(profile: str, environ: Mapping[str, str]) -> str:
    """Differs where another account, or another endpoint in its place, would answer."""
    words = [profile]
    for name in sorted(environ):
        if name.startswith("AWS_ENDPOINT_URL") or name in (
            "AWS_ACCESS_KEY_ID",
            "AWS_PROFILE",
            "AWS_DEFAULT_PROFILE",
            "AWS_ROLE_ARN",
            "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
        ):
            words.append(f"{name}={environ[name]}")
    for path in (_config_file(environ), _credentials_file(environ)):
        if path.is_file():
            words.append(f"{path}:{path.stat().st_mtime_ns}")
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def _config_file(environ: Mapping[str, str]) -> Path:
    given = environ.get("AWS_CONFIG_FILE", "")
    return Path(given).expanduser() if given else _home(environ) / ".aws" / "config"


def _credentials_file(environ: Mapping[str, str]) -> Path:
    given = environ.get("AWS_SHARED_CREDENTIALS_FILE", "")
    return Path(given).expanduser() if given else _home(environ) / ".aws" / "credentials"


def _home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HOME") or Path.home())
