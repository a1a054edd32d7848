"""AWS's own library, made once per provider: sessions, clients, time limits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from labctl.providers.aws.request_batcher import Answer, Together

if TYPE_CHECKING:
    import boto3

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 30
ATTEMPTS = 4
MOST_CONNECTIONS = 32
# An access key never moves to another account, so one answer holds for the whole process. The
# second key is the endpoint: a rehearsal may take the same access key as another.
_ACCOUNT_IDS: dict[tuple[str, str], str] = {}


class Clients:
    """Clients by service and region. They may be used from several threads at once."""

    def __init__(self, profile: str) -> None:
        self._profile = profile
        self._lock = threading.Lock()
        self._session: boto3.session.Session | None = None
        self._made: dict[tuple[str, str, bool], Any] = {}
        self._kept: dict[tuple[str, str], Any] = {}

    def client(self, service: str, region: str, *, once: bool = False) -> Any:
        """`once`: a call is sent a single time, since the library itself repeats capacity errors
        where they came from, and a reply that was lost must be asked for with the same token."""
        key = (service, region, once)
        # Making one is not safe on two threads.
        with self._lock:
            if key not in self._made:
                self._made[key] = self._new(service, region, 1 if once else ATTEMPTS)
            return self._made[key]

    def ec2(self, region: str) -> Any:
        return self.client("ec2", region)

    def together(
        self, call: str, region: str, ask: Callable[[Any, list[str]], dict[str, Answer]]
    ) -> Together[Answer]:
        """The one place where calls of this kind to a region meet; `ask` gets its EC2 client."""
        ec2 = self.ec2(region)
        with self._lock:
            kept: Together[Answer] = self._kept.setdefault(
                (call, region), Together(lambda ids: ask(ec2, ids))
            )
            return kept

    def partition(self, region: str) -> str:
        """ "aws", "aws-cn", ...: the second word of every ARN there."""
        with self._lock:
            return str(self._connected().get_partition_for_region(region))

    def account_id(self, region: str) -> str:
        """The account of the credentials that the session has now; asked once for each of them."""
        from labctl.providers.aws.errors import told

        sts = self.client("sts", region)
        with told():
            found = self._session.get_credentials() if self._session else None
            access_key = found.get_frozen_credentials().access_key if found else ""
            key = (access_key, str(sts.meta.endpoint_url))
            if key not in _ACCOUNT_IDS:
                _ACCOUNT_IDS[key] = str(sts.get_caller_identity()["Account"])
            return _ACCOUNT_IDS[key]

    def _connected(self) -> boto3.session.Session:
        if self._session is None:
            import boto3

            from labctl.providers.aws.errors import told

            with told():
                self._session = boto3.session.Session(profile_name=self._profile or None)
        return self._session

    def _new(self, service: str, region: str, attempts: int) -> Any:
        session = self._connected()
        from botocore.config import Config

        from labctl.providers.aws.errors import told

        with told():
            return session.client(
                service,
                region_name=region,
                config=Config(
                    connect_timeout=CONNECT_TIMEOUT_S,
                    read_timeout=READ_TIMEOUT_S,
                    retries={"mode": "standard", "total_max_attempts": attempts},
                    max_pool_connections=MOST_CONNECTIONS,
                    user_agent_appid="labctl",
                ),
            )
