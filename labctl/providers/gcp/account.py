"""Project, region and credentials from gcloud's own configuration, read without Google's SDK.

The SDK takes seconds to import, and results from the cache do not need it.
"""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from pathlib import Path

import msgspec

from labctl.config import expand_user, find_home
from labctl.decoding import decode_json
from labctl.model import Value

DEFAULT_REGION = "us-central1"
KEY_FILE = "GOOGLE_APPLICATION_CREDENTIALS"
LOGIN_FILE = "application_default_credentials.json"


class CredentialFile(Value, frozen=True):
    """The names in a file of credentials that name a project."""

    project_id: str = ""
    quota_project_id: str = ""


def find_credential_file(environ: Mapping[str, str]) -> Path | None:
    """Return the file that Google's SDKs read (Application Default Credentials), if it exists.

    A machine's own service account does not count as the user's.
    """
    named = environ.get(KEY_FILE, "")
    path = expand_user(named) if named else _find_config_dir(environ) / LOGIN_FILE
    return path if path.is_file() else None


def resolve_project(project: str, environ: Mapping[str, str]) -> str:
    """Return the project that gcloud and Google's SDKs would use; "" if none is named."""
    if project:
        return project
    for variable in ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT"):
        if environ.get(variable):
            return environ[variable]
    credentials = _read_credential_file(environ)
    gcloud = _read_gcloud(environ, "core", "project")
    return credentials.project_id or gcloud or credentials.quota_project_id


def resolve_region(environ: Mapping[str, str]) -> str:
    """Return gcloud's region, from the environment or its configuration; else us-central1."""
    named = environ.get("CLOUDSDK_COMPUTE_REGION") or _read_gcloud(environ, "compute", "region")
    return named or DEFAULT_REGION


def _read_credential_file(environ: Mapping[str, str]) -> CredentialFile:
    path = find_credential_file(environ)
    try:
        return decode_json(path.read_bytes(), CredentialFile) if path else _NOTHING
    except (OSError, msgspec.DecodeError):
        # Google's SDK reports what is wrong in the file as soon as it is used.
        return _NOTHING


def _read_gcloud(environ: Mapping[str, str], section: str, name: str) -> str:
    """Return a property of gcloud's active configuration; "" if it is not set."""
    directory = _find_config_dir(environ)
    active = environ.get("CLOUDSDK_ACTIVE_CONFIG_NAME", "")
    parser = configparser.RawConfigParser()
    try:
        active = active or (directory / "active_config").read_text(encoding="utf-8").strip()
        parser.read(directory / "configurations" / f"config_{active}", encoding="utf-8")
    except (OSError, UnicodeDecodeError, configparser.Error):
        return ""
    return parser.get(section, name, fallback="").strip()


def _find_config_dir(environ: Mapping[str, str]) -> Path:
    named = environ.get("CLOUDSDK_CONFIG", "")
    return expand_user(named) if named else find_home(environ) / ".config" / "gcloud"


_NOTHING = CredentialFile()
