"""A cluster with Slurm: the server is its login node, and each run is a job.

Nothing is allocated before a run, and nothing is installed: the lab is a directory in the user's
home, which all machines of the cluster share, and a file there that says that the lab is in use.
labctl logs in like the user (their key, agent, ssh_config).
"""

from __future__ import annotations

import time
from functools import cached_property
from typing import ClassVar

from labctl.commands import slurm
from labctl.errors import BusyError, ProviderError, SchedulerBusyError, UsageError
from labctl.errors.replies import describe_error
from labctl.model import (
    Check,
    CreateServerRequest,
    Need,
    Offer,
    ProviderAccount,
    Resource,
    Server,
    Value,
)
from labctl.providers import ProviderContext
from labctl.providers.slurm.settings import PROVIDER, SETTINGS_EXAMPLE, SlurmSettings
from labctl.providers.static.machines import ConfiguredMachine, StaticSettings, list_machines
from labctl.wire.runs import SLURM, JobRequest

__all__ = ["SlurmProvider", "SlurmSettings"]

SCRIPT_TIMEOUT_S = 60.0
# the kind of a leftover
JOB = "job"


class SlurmProvider:
    """Uses one login node. A server's id contains the node and the token of its file there."""

    name: ClassVar[str] = PROVIDER
    settings_type: ClassVar[type[Value]] = SlurmSettings
    logs_in_as_user: ClassVar[bool] = True
    settings_example: ClassVar[str] = SETTINGS_EXAMPLE
    job_executor: ClassVar[str] = SLURM
    settle_s: float = 0.0

    def __init__(self, settings: SlurmSettings, context: ProviderContext) -> None:
        self.settings = settings
        self.context = context

    @cached_property
    def login(self) -> ConfiguredMachine:
        self.check_settings()
        return list_machines(StaticSettings(hosts=(self.settings.login,)), self.context)[0]

    def get_account(self) -> ProviderAccount:
        """Return no account: nothing here has a price."""
        return ProviderAccount()

    def check_settings(self) -> None:
        if not self.settings.login:
            raise UsageError(
                f"server.{PROVIDER}.login in lab.yaml names no login node",
                hint="write it in lab.yaml, for example:\n"
                "server: {provider: slurm, slurm: {login: alice@login.hpc.example}}",
            )

    def check(self, need: Need | None = None) -> list[Check]:
        """Check that the login node answers, and that Slurm answers there."""
        try:
            version = self._run(slurm.VERSION).strip()
        except (BusyError, ProviderError) as error:
            detail = describe_error(error)
            return [Check(name=self.login.name, ok=False, detail=detail, next=error.hint)]
        detail = f"{version}; {slurm.describe_free(self._list_partitions())}"
        return [Check(name=self.login.name, ok=True, detail=detail)]

    def offers(self, need: Need) -> list[Offer]:
        """List the partitions that may run the lab: the configured one, or all of them.

        Without a configured one, the default partition of the cluster is first.
        """
        chosen = self.settings.partition
        return [
            Offer(
                provider=PROVIDER,
                type=partition.name,
                zone=self.login.name,
                cpus=partition.cpus,
                memory_bytes=partition.memory_bytes,
                gpu_name=partition.gpu_name,
                gpu_count=partition.gpus,
                free_gpus=partition.free_gpus,
                all_gpus=partition.all_gpus,
            )
            for partition in self._list_partitions()
            if partition.name == chosen or not chosen
            if partition.gpus >= need.gpu.count or not need.gpu.is_required
        ]

    def create(self, offer: Offer, request: CreateServerRequest) -> Server:
        """Write the lab's file on the login node; the same token writes the same file."""
        claim = slurm.LabClaim(
            token=request.token,
            lab=request.lab,
            lab_id=request.lab_id,
            created_at=time.time(),
            partition=offer.type,
        )
        claims = slurm.parse_claims(self._run(slurm.build_claim(claim, self.settings.base)))
        if not claims:
            raise ProviderError(
                f"{self.login.name} has stored no claim of the lab",
                why="the home directory there may be full",
                hint=self.context.subject.check,
            )
        return self._make_server(claims[0])

    def find(self, server_id: str) -> Server | None:
        token = self._find_token(server_id)
        claims = [claim for claim in self._list_claims() if claim.token == token]
        return self._make_server(claims[0]) if claims else None

    def servers(self) -> list[Server]:
        return [self._make_server(claim) for claim in self._list_claims()]

    def terminate(self, server_id: str) -> None:
        """Cancel the lab's jobs and remove its file. The files of its runs stay."""
        token = self._find_token(server_id)
        for claim in self._list_claims():
            if claim.token == token:
                self._run(slurm.build_release(claim))

    def leftovers(self) -> list[Resource]:
        """List the jobs of labs by their comments; those of a lab in use belong to its server."""
        servers = {server.lab_id: server.id for server in self.servers()}
        return [
            Resource(
                provider=PROVIDER,
                kind=JOB,
                id=job.id,
                note=job.state.lower(),
                lab_id=job.lab_id,
                server_id=servers.get(job.lab_id, ""),
            )
            for job in slurm.parse_jobs(self._run(slurm.LIST_JOBS))
        ]

    def remove(self, resource: Resource) -> None:
        if resource.kind == JOB:
            self._run(slurm.build_cancel(resource.id))

    def remove_files(self, lab: str, lab_id: str) -> None:
        """Remove the lab's directory from the login node: its results were saved."""
        self._run(slurm.build_removal(lab, lab_id))

    def build_job_request(self, need: Need, offer: Offer) -> JobRequest:
        """Say what a job of the lab asks of Slurm, in the partition of `offer`."""
        settings, gpu = self.settings, need.gpu
        gpus = ""
        if gpu.is_required:
            kind = "" if gpu.kind == "any" else f"{gpu.kind.lower()}:"
            gpus = f"gpu:{kind}{max(1, gpu.count)}"
        return JobRequest(
            partition=settings.partition or offer.type,
            account=settings.account,
            qos=settings.qos,
            time_s=settings.time or 0,
            gpus=gpus,
            modules=settings.modules,
            options=settings.options,
            runtime=settings.runtime,
        )

    def _list_partitions(self) -> list[slurm.Partition]:
        return slurm.parse_partitions(self._run(slurm.PARTITIONS))

    def _list_claims(self) -> list[slurm.LabClaim]:
        return slurm.parse_claims(self._run(slurm.LIST_CLAIMS))

    def _find_token(self, server_id: str) -> str:
        prefix = self._make_id("")
        return server_id.removeprefix(prefix) if server_id.startswith(prefix) else ""

    def _make_id(self, token: str) -> str:
        return f"{PROVIDER}-{self.login.slug}-{token}"

    def _make_server(self, claim: slurm.LabClaim) -> Server:
        return Server(
            id=self._make_id(claim.token),
            provider=PROVIDER,
            lab=claim.lab,
            lab_id=claim.lab_id,
            alias=claim.lab,
            endpoint=self.login.endpoint,
            state="running",
            offer=Offer(provider=PROVIDER, type=claim.partition, zone=self.login.name),
            created_at=claim.created_at,
        )

    def _run(self, script: str) -> str:
        """Run a script on the login node, and return what it prints.

        SchedulerBusyError if Slurm does not answer it, ProviderError if it fails otherwise.
        """
        transport = self.context.connect(self.login.endpoint)
        result = transport.run(script, timeout_s=SCRIPT_TIMEOUT_S, check=False)
        if result.code == slurm.NO_ANSWER:
            raise SchedulerBusyError(
                f"Slurm does not answer on {self.login.name}",
                why=result.stderr.strip()[-1000:],
                hint=f"{self.context.subject.refresh}   # after a while",
            )
        if result.code == slurm.OTHER_BASE:
            raise UsageError(
                f"~/labctl on {self.login.name} is not at the base {self.settings.base}",
                why=f"it is at {result.stderr.strip()}, and all labs of an account share it",
                hint="labctl orphans   # lists the labs there; write their base, or end them first",
            )
        if result.code == slurm.FOREIGN_BASE:
            raise UsageError(
                f"the base {self.settings.base} on {self.login.name} belongs to another account",
                why=f"its owner is {result.stderr.strip()}, who could read and change your labs",
                hint="labctl up   # after you have written another `base` in lab.yaml",
            )
        if result.code:
            raise ProviderError(
                f"{self.login.name} cannot be used as a login node of Slurm",
                why=result.stderr.strip()[-1000:],
                hint=self.context.subject.check,
            )
        output: str = result.stdout
        return output
