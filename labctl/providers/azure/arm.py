"""Calls of Azure Resource Manager, with Microsoft's libraries for signing in and for HTTP.

azure-identity finds the credentials, and azure-core sends the requests. Microsoft's clients of
single services are not used: they take 47 MB and 3 s to import, for a dozen calls.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlencode

import msgspec

from labctl.config import copy_environment
from labctl.config.installation import install_command
from labctl.decoding import decode_json
from labctl.errors import BusyError, ConnectError, CredentialsError, LabError, ProviderError
from labctl.lazy import lazy_imports
from labctl.model import Value
from labctl.providers.azure.account import SUBSCRIPTION, resolve_subscription
from labctl.providers.azure.errors import (
    SIGN_IN,
    ArmErrorBody,
    ArmFault,
    is_absent,
    parse_fault,
    translate_fault,
)
from labctl.providers.azure.replies import ArmPage, OperationReply
from labctl.providers.azure.settings import AzureSettings
from labctl.retry import retry_on

with lazy_imports(__name__):
    from azure import core as azure_core
    from azure import identity
    from azure.core import exceptions as azure_errors
    from azure.core import rest
    from azure.core.pipeline import policies

PUBLIC_URL = "https://management.azure.com"
CONNECT_S, READ_S = 10.0, 60.0
# A call that only reads is tried again after a lost reply, and for this long while it is throttled.
READ_TRIES, READ_PAUSE_S, THROTTLED_S = 3, 0.5, 20.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
RESOURCES = "2021-04-01"

ArmReply = TypeVar("ArmReply", bound=Value)


class BegunCall(NamedTuple):
    """An accepted call: `operation_url` is where its result can be read, "" if it is complete."""

    operation_url: str
    content: bytes


class Arm:
    """A client of one subscription, for use from several threads at once."""

    def __init__(self, settings: AzureSettings) -> None:
        self._settings = settings
        self._base = (settings.endpoint_url or PUBLIC_URL).rstrip("/")
        self._lock = threading.Lock()
        self._client: Any = None

    @property
    def subscription(self) -> str:
        """The id of the subscription that pays. CredentialsError if nothing names one."""
        found = resolve_subscription(self._settings.subscription, copy_environment())
        if not found:
            raise CredentialsError(
                "no Azure subscription was found",
                why=f"neither server.azure.subscription, {SUBSCRIPTION} nor `az login` names one",
                hint=SIGN_IN,
            )
        return found

    def subscription_path(self, rest_of_path: str = "") -> str:
        return f"/subscriptions/{self.subscription}{rest_of_path}"

    @property
    def group_path(self) -> str:
        """The path of the resource group, which is its id too."""
        return self.subscription_path(f"/resourceGroups/{self._settings.resource_group}")

    def resource_path(self, kind: str, name: str = "") -> str:
        """Return the path of a resource, or of all of its kind (Microsoft.Compute/disks)."""
        return f"{self.group_path}/providers/{kind}" + (f"/{name}" if name else "")

    def find(
        self, reply: type[ArmReply], path: str, version: str, action: str, **query: str
    ) -> ArmReply | None:
        """Read one resource; None if it does not exist."""
        try:
            return _decode(self._read(self._make_url(path, version, query), action), reply)
        except LabError as error:
            if is_absent(error):
                return None
            raise

    def list_all(
        self, reply: type[ArmReply], path: str, version: str, action: str, **query: str
    ) -> list[ArmReply]:
        """List resources over all pages; none if their group does not exist."""
        url: str | None = self._make_url(path, version, query)
        items: list[ArmReply] = []
        while url:
            try:
                page = _decode(self._read(url, action), ArmPage)
            except LabError as error:
                if is_absent(error):
                    return items
                raise
            items += [_decode(bytes(item), reply) for item in page.value]
            url = self._require_own(page.next_link) if page.next_link else None
        return items

    def begin(
        self, method: str, path: str, version: str, action: str, body: Value | None = None
    ) -> BegunCall:
        """Send one call that may change something. It is never repeated here."""
        return self._send(method, self._make_url(path, version, {}), action, body)

    def create_or_replace(
        self, path: str, version: str, action: str, body: Value, wait_s: float
    ) -> None:
        """Create or replace a resource, and wait until that is done, at most `wait_s`."""
        if not self.wait(self.begin("PUT", path, version, action, body), action, wait_s):
            name = path.rpartition("/")[2]
            raise BusyError(
                f"Azure has not finished {name} yet",
                why=f"{action} is still in progress",
                hint="run the same command again in a minute",
            )

    def wait(self, begun: BegunCall, action: str, wait_s: float) -> bool:
        """Wait for an operation; return whether it is done, raise the error that it ended with.

        BusyError if Azure cannot be asked: it has accepted the call, which goes on.
        """
        end_s, pause_s = time.monotonic() + wait_s, FIRST_PAUSE_S
        while begun.operation_url:
            try:
                url = self._require_own(begun.operation_url)
                reply = _decode(self._read(url, action), OperationReply)
            except LabError as error:
                raise BusyError(
                    f"Azure has not said how {action} ended", why=error.what, hint=error.next_step
                ) from error
            if reply.status == "Succeeded":
                return True
            if reply.status in ("Failed", "Canceled"):
                # A definite end, whose code says why.
                fault = ArmFault(400, reply.error or ArmErrorBody(code=reply.status))
                raise translate_fault(fault, action) from fault
            if time.monotonic() >= end_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return True

    def _read(self, url: str, action: str) -> bytes:
        policy = retry_on((ConnectError, BusyError), pause_s=READ_PAUSE_S, tries=READ_TRIES)
        end_s = time.monotonic() + THROTTLED_S
        while True:
            try:
                return policy(lambda: self._send("GET", url, action, None)).content
            except LabError as error:
                fault = error.__cause__
                wait_s = fault.retry_after_s if isinstance(fault, ArmFault) else 0.0
                if not wait_s or time.monotonic() + wait_s > end_s:
                    raise
                time.sleep(wait_s)

    def _send(self, method: str, url: str, action: str, body: Value | None) -> BegunCall:
        content = msgspec.json.encode(body) if body is not None else None
        headers = {"Content-Type": "application/json"} if content else {}
        try:
            response = self._ensure_client().send_request(
                rest.HttpRequest(method, url, content=content, headers=headers),
                connection_timeout=CONNECT_S,
                read_timeout=READ_S,
                # Only a rehearsal on this machine has an address without TLS (see settings).
                enforce_https=self._base.startswith("https://"),
            )
            response.read()
        except ModuleNotFoundError as error:
            raise _make_missing_error() from error
        except azure_errors.ClientAuthenticationError as error:
            raise CredentialsError(
                "no Azure credentials were found or accepted", why=error.message, hint=SIGN_IN
            ) from error
        except azure_errors.AzureError as error:
            raise ConnectError(
                "Azure does not answer",
                why=str(error.message),
                hint="check the network, then run the same command again",
            ) from error
        if response.status_code >= 400:
            fault = parse_fault(response.status_code, response.content, response.headers)
            raise translate_fault(fault, action) from fault
        return BegunCall(response.headers.get("Azure-AsyncOperation", ""), response.content)

    def _ensure_client(self) -> Any:
        with self._lock:
            if self._client is None:
                # Nothing here opens a browser: a login belongs to `az login`.
                credential = identity.DefaultAzureCredential(
                    exclude_shared_token_cache_credential=True,
                    exclude_visual_studio_code_credential=True,
                )
                scope = f"{PUBLIC_URL}/.default"
                self._client = azure_core.PipelineClient(
                    self._base,
                    policies=[
                        policies.UserAgentPolicy("labctl"),
                        policies.BearerTokenCredentialPolicy(credential, scope),
                    ],
                )
            return self._client

    def _make_url(self, path: str, version: str, query: dict[str, str]) -> str:
        words = {"api-version": version}
        words.update({f"${name}": value for name, value in query.items()})
        return f"{self._base}{path}?{urlencode(words, safe='$')}"

    def _require_own(self, url: str) -> str:
        """Return the URL of a reply. The token is sent only to where the call itself went."""
        if not url.startswith(f"{self._base}/"):
            raise ProviderError(
                "Azure's reply leads to an address that is not Azure's",
                why=url,
                hint="labctl doctor --provider azure",
            )
        return url


def _decode(content: bytes, reply: type[ArmReply]) -> ArmReply:
    try:
        return decode_json(content or b"{}", reply)
    except msgspec.DecodeError as error:
        raise ProviderError(
            "Azure sent a reply that labctl cannot read",
            why=str(error),
            hint="labctl doctor --provider azure",
        ) from error


def _make_missing_error() -> ProviderError:
    return ProviderError(
        "the azure extra is not installed",
        why="provider: azure needs Microsoft's libraries azure-identity and azure-core",
        hint=install_command("azure"),
    )
