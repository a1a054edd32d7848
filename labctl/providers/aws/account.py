"""Account and region from AWS's own configuration, read without boto3.

boto3 takes a quarter of a second to import, and results from the cache do not need it.
"""

from __future__ import annotations

import configparser
import hashlib
from collections.abc import Mapping
from pathlib import Path

from labctl.config import expand_user, find_home

DEFAULT_REGION = "us-east-1"
# Each of these variables makes boto3 find credentials.
CREDENTIAL_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
# Settings in ~/.aws/config that name credentials. A region alone does not.
CREDENTIAL_KEYS = ("aws_access_key_id", "sso_", "role_arn", "credential_process", "login_session")


def resolve_profile_name(profile: str, environ: Mapping[str, str]) -> str:
    """Return the profile whose credentials boto3 uses; "" if they come from elsewhere."""
    if profile:
        return profile
    if environ.get("AWS_ACCESS_KEY_ID"):
        return ""  # boto3 prefers these to AWS_PROFILE
    if named := environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE"):
        return named
    files = (_config_file(environ), _credentials_file(environ))
    return "default" if any(path.is_file() for path in files) else ""


def has_credentials(profile: str, environ: Mapping[str, str]) -> bool:
    """Whether the user has set up credentials. A machine's own role does not count."""
    if profile or any(environ.get(name) for name in CREDENTIAL_VARIABLES):
        return True
    if _credentials_file(environ).is_file():
        return True
    try:
        text = _config_file(environ).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return any(key in text for key in CREDENTIAL_KEYS)


def resolve_home_region(profile: str, environ: Mapping[str, str]) -> str:
    """Return the region that `aws` would use: environment, else profile, else us-east-1."""
    for variable in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        if environ.get(variable):
            return environ[variable]
    name = profile or environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE") or "default"
    parser = configparser.RawConfigParser()
    try:
        parser.read(_config_file(environ), encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        # boto3 reports what is wrong in the file as soon as it is used.
        return DEFAULT_REGION
    for section in (f"profile {name}", name):
        if parser.has_option(section, "region"):
            return parser.get(section, "region").strip() or DEFAULT_REGION
    return DEFAULT_REGION


def fingerprint(profile: str, environ: Mapping[str, str]) -> str:
    """Hash what selects the account and the endpoints: differs if another account may answer."""
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
    path = environ.get("AWS_CONFIG_FILE", "")
    return expand_user(path) if path else find_home(environ) / ".aws" / "config"


def _credentials_file(environ: Mapping[str, str]) -> Path:
    path = environ.get("AWS_SHARED_CREDENTIALS_FILE", "")
    return expand_user(path) if path else find_home(environ) / ".aws" / "credentials"
