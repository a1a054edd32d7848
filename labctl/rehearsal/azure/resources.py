"""The bodies of requests and replies of a rehearsed Azure, with Azure's own names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from labctl.model import Value
from labctl.rehearsal.core.fleet import CloudInstance

# The properties of a resource, of which the rehearsal reads a few. They have the types of JSON.
Properties = Any


class ArmResource(Value, frozen=True, rename="camel"):
    """Any resource. Of its properties this rehearsal reads a few, and keeps the others as sent."""

    location: str = ""
    id: str = ""
    name: str = ""
    type: str = ""
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    sku: dict[str, str] | UnsetType = UNSET
    managed_by: str | UnsetType = UNSET
    properties: Properties = msgspec.field(default_factory=dict)


class ArmListing(Value, frozen=True):
    value: tuple[Any, ...]


class ArmProblem(Value, frozen=True):
    code: str
    message: str


class ArmProblemDocument(Value, frozen=True):
    error: ArmProblem


class OperationState(Value, frozen=True):
    name: str
    status: str
    error: ArmProblem | UnsetType = UNSET


class TagsPart(Value, frozen=True):
    tags: dict[str, str] = msgspec.field(default_factory=dict)


class TagsChange(Value, frozen=True):
    """A change of tags, or with `operation` unset, what they are now."""

    properties: TagsPart
    operation: Literal["Merge", "Replace", "Delete"] | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class SubmitBody(Value, frozen=True, rename="camel"):
    schedule: dict[str, str]
    resources: dict[str, tuple[str, ...]]
    execution_parameters: Properties
    correlationid: str


class CancelBody(Value, frozen=True, rename="camel"):
    operation_ids: tuple[str, ...]
    correlationid: str


@dataclass
class AzureMachine(CloudInstance):
    """A machine: `body` is what it was created with, `failed` one that Azure had no room for."""

    body: ArmResource = field(default_factory=ArmResource)
    failed: bool = False

    @property
    def nic_name(self) -> str:
        profile = self.body.properties["networkProfile"]
        return str(profile["networkInterfaces"][0]["id"]).rpartition("/")[2]

    @property
    def disk_name(self) -> str:
        return str(self.body.properties["storageProfile"]["osDisk"]["name"])


def last_segment(resource_id: str) -> str:
    return resource_id.rpartition("/")[2]
