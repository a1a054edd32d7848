"""A small cloud on the core that all clouds with an HTTP API share: for its tests."""

from __future__ import annotations

import msgspec
from werkzeug.datastructures import Headers

from labctl.errors import CapacityError, QuotaError
from labctl.model import Value
from labctl.providers.http import CloudDescription, ErrorDetail
from labctl.rehearsal.core.application import CloudApi
from labctl.rehearsal.core.fleet import CloudInstance
from labctl.rehearsal.core.operations import (
    AnyOperation,
    ApiCall,
    ApiError,
    ErrorReplies,
    NoBody,
    Operation,
)
from labctl.rehearsal.core.scenario import CloudScenario
from labctl.rehearsal.core.simulation import CloudRehearsal
from labctl.rehearsal.core.validation import OpenApiValidator

MACHINE = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "state": {"enum": ["pending", "running"]}},
    "required": ["id", "state"],
}
DESCRIPTION = {
    "openapi": "3.1.0",
    "paths": {
        "/machines": {
            "get": {
                "parameters": [
                    {"in": "query", "name": "most", "schema": {"type": "integer", "minimum": 1}}
                ],
                "responses": {
                    "200": {
                        "content": {
                            "application/json": {
                                "schema": {
                                    "type": "object",
                                    "properties": {
                                        "machines": {
                                            "type": "array",
                                            "items": {"$ref": "#/components/schemas/Machine"},
                                        }
                                    },
                                }
                            }
                        }
                    },
                    "default": {"$ref": "#/components/responses/Error"},
                },
            },
            "post": {
                "requestBody": {"$ref": "#/components/requestBodies/Create"},
                "responses": {
                    "201": {
                        "content": {
                            "application/json": {"schema": {"$ref": "#/components/schemas/Machine"}}
                        }
                    },
                    "default": {"$ref": "#/components/responses/Error"},
                },
            },
        },
        "/machines/{id}": {
            "parameters": [
                {"in": "path", "name": "id", "required": True, "schema": {"pattern": "^m-"}}
            ],
            "delete": {
                "responses": {
                    "204": {"description": "gone"},
                    "default": {"$ref": "#/components/responses/Error"},
                }
            },
        },
    },
    "components": {
        "schemas": {"Machine": MACHINE},
        "requestBodies": {
            "Create": {
                "required": True,
                "content": {
                    "application/json": {
                        "schema": {
                            "type": "object",
                            "properties": {"kind": {"type": "string", "maxLength": 10}},
                            "required": ["kind"],
                        }
                    }
                },
            }
        },
        "responses": {
            "Error": {
                "content": {
                    "application/json": {
                        "schema": {
                            "type": "object",
                            "properties": {"error": {"type": "string"}},
                            "required": ["error"],
                        }
                    }
                }
            }
        },
    },
}


class Ordered(Value, frozen=True):
    kind: str = ""


class Misspelled(Value, frozen=True):
    kind: str = "small"
    kindd: str = "small"


class Machine(Value, frozen=True):
    id: str
    state: str


class MachineList(Value, frozen=True):
    machines: tuple[Machine, ...]


class Refusal(Value, frozen=True):
    error: str
    text: str = ""


class SmallApi:
    """Machines by kind, one path each to create, list and delete them."""

    errors = ErrorReplies(
        unauthorized=ApiError(401, "unauthorized"),
        expired=ApiError(401, "expired"),
        denied=ApiError(403, "denied"),
        throttled=ApiError(429, "slow-down", headers=(("Retry-After", "0"),)),
        not_found=ApiError(404, "no-such-path"),
        invalid=ApiError(400, "invalid"),
    )
    validator = OpenApiValidator(DESCRIPTION)

    def __init__(self, cloud: SmallCloud) -> None:
        self.cloud = cloud

    def list_operations(self) -> tuple[AnyOperation, ...]:
        return (
            Operation("list", "GET", "/machines", self.list_machines, NoBody),
            Operation("create", "POST", "/machines", self.create, Ordered, status=201),
            Operation("delete", "DELETE", "/machines/<id>", self.delete, NoBody, status=204),
        )

    def check_access(self, name: str, headers: Headers) -> None:
        if headers.get("Authorization") != "Bearer the-key-of-this-test":
            raise self.errors.unauthorized

    def write_error(self, error: ApiError) -> bytes:
        return msgspec.json.encode(Refusal(error=error.code, text=error.message))

    def write_result(self, result: Value) -> bytes:
        return msgspec.json.encode(result)

    def list_machines(self, call: ApiCall[NoBody]) -> MachineList:
        most = int(call.query.get("most", 1000))
        shown = self.cloud.fleet.list_shown()[:most]
        return MachineList(machines=tuple(Machine(id=one.id, state=one.state) for one in shown))

    def create(self, call: ApiCall[Ordered]) -> Machine:
        with self.cloud.fleet.lock:
            if self.cloud.fleet.count_alive() >= self.cloud.scenario.quota:
                raise ApiError(400, "quota/machines")
            if not self.cloud.fleet.has_capacity(call.body.kind, ""):
                raise ApiError(503, "sold-out")
            if call.body.kind == "wrong":
                return Machine(id="m-wrong", state="unheard-of")
            number = len(self.cloud.fleet.list_all())
            instance = CloudInstance(id=f"m-{number}", type=call.body.kind)
            self.cloud.fleet.add(instance)
        return Machine(id=instance.id, state=instance.state)

    def delete(self, call: ApiCall[NoBody]) -> None:
        instance = self.cloud.fleet.find(call.path["id"])
        if instance is None:
            raise ApiError(404, "no-such-machine")
        self.cloud.fleet.terminate(instance)


class SmallCloud(CloudRehearsal[CloudScenario, CloudInstance]):
    after_power_off = "ended"

    @property
    def environment(self) -> dict[str, str]:
        return {"SMALL_ENDPOINT_URL": self.url, "SMALL_KEY": "the-key-of-this-test"}

    def build_api(self) -> CloudApi:
        return SmallApi(self)


def parse_error(body: bytes) -> ErrorDetail:
    try:
        refusal = msgspec.json.decode(body, type=Refusal)
    except msgspec.MsgspecError:
        return ErrorDetail()
    return ErrorDetail(code=refusal.error, message=refusal.text)


SMALL = CloudDescription(
    name="Small Cloud",
    provider="small",
    endpoint="https://small.invalid",
    endpoint_variable="SMALL_ENDPOINT_URL",
    key_variables=("SMALL_KEY",),
    key_files=(".small/key",),
    key_help="make a key",
    quota_help="ask for more",
    parse_error=parse_error,
    codes={"quota/*": QuotaError, "sold-out": CapacityError},
)
