"""boto3 sessions and clients, created once per provider, with their time limits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from labctl.lazy import lazy_imports
from labctl.providers.aws.request_batcher import Answer, RequestBatcher

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_pricing import PricingClient
    from mypy_boto3_scheduler import EventBridgeSchedulerClient
    from mypy_boto3_service_quotas import ServiceQuotasClient
    from mypy_boto3_ssm import SSMClient
    from mypy_boto3_sts import STSClient

with lazy_imports(__name__):
    import boto3
    from botocore import config as boto_config

    from labctl.providers.aws import errors

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 30
ATTEMPTS = 4
MOST_CONNECTIONS = 32
# (access key, endpoint) -> account. An access key never moves to another account, so the result is
# valid for the whole process. The endpoint counts too: rehearsals may share an access key.
_ACCOUNT_IDS: dict[tuple[str, str], str] = {}


class Clients:
    """Clients by service and region, for use from several threads at once."""

    def __init__(self, profile: str) -> None:
        self._profile = profile
        self._lock = threading.Lock()
        self._session: boto3.session.Session | None = None
        self._clients: dict[tuple[str, str, bool], Any] = {}
        self._batchers: dict[tuple[str, str], Any] = {}

    def get_ec2(self, region: str, *, once: bool = False) -> EC2Client:
        """Return the client of EC2 in a region.

        With `once` boto3 does not repeat calls: it would repeat capacity errors in the same zone,
        and after a lost reply the caller must repeat the request with the same token.
        """
        ec2: EC2Client = self._get_client("ec2", region, once=once)
        return ec2

    def get_pricing(self, region: str) -> PricingClient:
        pricing: PricingClient = self._get_client("pricing", region)
        return pricing

    def get_quotas(self, region: str) -> ServiceQuotasClient:
        quotas: ServiceQuotasClient = self._get_client("service-quotas", region)
        return quotas

    def get_scheduler(self, region: str) -> EventBridgeSchedulerClient:
        scheduler: EventBridgeSchedulerClient = self._get_client("scheduler", region)
        return scheduler

    def get_ssm(self, region: str) -> SSMClient:
        ssm: SSMClient = self._get_client("ssm", region)
        return ssm

    def get_sts(self, region: str) -> STSClient:
        sts: STSClient = self._get_client("sts", region)
        return sts

    def get_batcher(
        self, call: str, region: str, ask: Callable[[EC2Client, list[str]], dict[str, Answer]]
    ) -> RequestBatcher[Answer]:
        """Return the batcher of one kind of call to a region; `ask` gets its EC2 client."""
        ec2 = self.get_ec2(region)
        with self._lock:
            batcher: RequestBatcher[Answer] = self._batchers.setdefault(
                (call, region), RequestBatcher(lambda ids: ask(ec2, ids))
            )
            return batcher

    def get_partition(self, region: str) -> str:
        """Return "aws", "aws-cn", ...: the second word of every ARN in the region."""
        with self._lock:
            return str(self._ensure_session().get_partition_for_region(region))

    def get_account_id(self, region: str) -> str:
        """Return the account of the session's current credentials; one call of AWS for each."""
        sts = self.get_sts(region)
        with errors.translate_errors():
            credentials = self._session.get_credentials() if self._session else None
            access_key = credentials.get_frozen_credentials().access_key if credentials else ""
            key = (access_key, str(sts.meta.endpoint_url))
            if key not in _ACCOUNT_IDS:
                _ACCOUNT_IDS[key] = str(sts.get_caller_identity()["Account"])
            return _ACCOUNT_IDS[key]

    def _get_client(self, service: str, region: str, *, once: bool = False) -> Any:
        key = (service, region, once)
        # boto3 cannot create clients in two threads at once.
        with self._lock:
            if key not in self._clients:
                self._clients[key] = self._create_client(service, region, 1 if once else ATTEMPTS)
            return self._clients[key]

    def _ensure_session(self) -> boto3.session.Session:
        if self._session is None:
            with errors.translate_errors():
                self._session = boto3.session.Session(profile_name=self._profile or None)
        return self._session

    def _create_client(self, service: str, region: str, attempts: int) -> Any:
        session = self._ensure_session()
        with errors.translate_errors():
            return session.client(
                service,
                region_name=region,
                config=boto_config.Config(  # type: ignore[call-arg] # the stubs lack user_agent_appid
                    connect_timeout=CONNECT_TIMEOUT_S,
                    read_timeout=READ_TIMEOUT_S,
                    retries={"mode": "standard", "total_max_attempts": attempts},
                    max_pool_connections=MOST_CONNECTIONS,
                    user_agent_appid="labctl",
                ),
            )
