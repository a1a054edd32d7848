"""Google's SDK with labctl's time limits: credentials and clients, created once per provider."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from labctl.config import copy_environment
from labctl.errors import CredentialsError, LabError
from labctl.lazy import lazy_imports
from labctl.providers.gcp import sdk
from labctl.providers.gcp.account import find_credential_file, resolve_project
from labctl.providers.gcp.errors import translate_errors
from labctl.providers.gcp.replies import GceOperation, Reply, decode_reply
from labctl.providers.gcp.settings import GcpSettings

with lazy_imports(__name__):
    from google import auth
    from google.api_core import retry as api_retry
    from google.auth.transport import requests as auth_requests

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
TIMEOUT_S = 30.0
# A call that changes nothing is repeated for this long after errors of Google's own.
RETRY_S = 20.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0


class GcpClients:
    """GcpClients by service, for use from several threads at once."""

    def __init__(self, settings: GcpSettings) -> None:
        self._settings = settings
        self._lock = threading.RLock()
        self._credentials: Any = None
        self._clients: dict[str, object] = {}

    @property
    def project(self) -> str:
        """The project that pays. CredentialsError if nothing names one."""
        project = resolve_project(self._settings.project, copy_environment())
        if not project:
            raise CredentialsError(
                "no Google Cloud project was found",
                why="neither server.gcp.project nor gcloud's configuration names one",
                hint="gcloud config set project PROJECT\nor set server.gcp.project in lab.yaml",
            )
        return project

    @property
    def types(self) -> Any:
        """The module of the SDK's message types."""
        return sdk.load_types()

    def call(self, service: str, method: str, permission: str, **fields: Any) -> Any:
        """Make one call that may change something; never repeated by the SDK."""
        with translate_errors(permission):
            return self._find_method(service, method)(
                {"project": self.project, **fields}, retry=None, timeout=TIMEOUT_S
            )

    def read(
        self, kind: type[Reply], service: str, method: str, permission: str, **fields: Any
    ) -> Reply:
        """Read one object."""
        return decode_reply(self._read(service, method, permission, fields), kind)

    def list_all(
        self, kind: type[Reply], service: str, method: str, permission: str, **fields: Any
    ) -> list[Reply]:
        """List objects, over all pages."""
        with translate_errors(permission):
            pages = self._read(service, method, permission, fields)
            return [decode_reply(item, kind) for item in pages]

    def list_everywhere(
        self, kind: type[Reply], service: str, items: str, permission: str, **fields: Any
    ) -> list[Reply]:
        """List the objects of all zones and regions; `items` is their field of one of these."""
        with translate_errors(permission):
            pages: Iterable[tuple[str, Any]] = self._read(
                service, "aggregated_list", permission, fields
            )
            return [
                decode_reply(item, kind) for _, scoped in pages for item in getattr(scoped, items)
            ]

    def wait_for(
        self, read: Callable[[], GceOperation], operation: GceOperation, deadline_s: float
    ) -> GceOperation:
        """Wait until an operation is done, at most `deadline_s`; return it as it is then.

        Google reports a lack of capacity or quota only here, seconds after the call.
        """
        end_s, pause_s = time.monotonic() + deadline_s, FIRST_PAUSE_S
        while operation.status != "DONE" and time.monotonic() < end_s:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            operation = read()
        return operation

    def open_session(self) -> Any:
        """Open an HTTP session with the credentials, for APIs outside of the compute SDK."""
        with translate_errors("credentials"):
            return auth_requests.AuthorizedSession(self._ensure_credentials())

    def _read(
        self, service: str, method: str, permission: str, fields: Mapping[str, object]
    ) -> Any:
        with translate_errors(permission):
            policy = api_retry.Retry(initial=0.3, maximum=3.0, timeout=RETRY_S)
            return self._find_method(service, method)(
                {"project": self.project, **fields}, retry=policy, timeout=TIMEOUT_S
            )

    def _find_method(self, service: str, method: str) -> Callable[..., Any]:
        with self._lock:
            if service not in self._clients:
                self._clients[service] = self._create_client(service)
            found: Callable[..., Any] = getattr(self._clients[service], method)
            return found

    def _create_client(self, service: str) -> Any:
        name = "".join(word.title() for word in service.split("_")) + "Client"
        endpoint = self._settings.endpoint_url
        options = {"api_endpoint": endpoint.rstrip("/")} if endpoint else None
        client = sdk.load_client(service, name)
        return client(credentials=self._ensure_credentials(), client_options=options)

    def _ensure_credentials(self) -> Any:
        with self._lock:
            if self._credentials is None:
                self._credentials = _load_credentials()
            return self._credentials


def _load_credentials() -> Any:
    """Load the credentials that every Google SDK would use.

    The file is named here, because the SDK asks gcloud for the project besides, in a process of a
    second. Its warnings are for programs that serve others: a person's own credentials are meant.
    """
    path = find_credential_file(copy_environment())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if path is None:
            return auth.default(scopes=[SCOPE])[0]
        return auth.load_credentials_from_file(str(path), scopes=[SCOPE])[0]


def is_absent(error: LabError) -> bool:
    """Whether Google answered that the object does not exist."""
    return int(getattr(error.__cause__, "code", 0) or 0) == 404
