"""Values of labctl and the records that carry them in messages."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from labctl.lifecycle.keeper_host import KeeperReport
from labctl.lifecycle.kept_labs import KeeperCheck
from labctl.model import (
    Endpoint,
    GpuNeed,
    Need,
    Offer,
    Run,
    Server,
    Value,
    make_record,
    parse_record,
)
from labctl.state.ledgers import LedgerLine
from labctl.submissions.assignment import DeadlineStatus
from labctl.submissions.receiver import Hello
from labctl.wire import keeper, kept_labs, receiver
from labctl.wire.codec import MessageError, decode, encode, to_json

PAIRS: list[tuple[Any, type[Value]]] = [
    (kept_labs.LedgerLineRecord, LedgerLine),
    (kept_labs.KeptRunRecord, Run),
    (kept_labs.KeeperCheckRecord, KeeperCheck),
    (kept_labs.KeeperReportRecord, KeeperReport),
    (keeper.GpuNeedRecord, GpuNeed),
    (keeper.NeedRecord, Need),
    (keeper.OfferRecord, Offer),
    (keeper.EndpointRecord, Endpoint),
    (keeper.SeatServerRecord, Server),
    (receiver.DeadlineRecord, DeadlineStatus),
    (receiver.ReceiverGreetingRecord, Hello),
]
NEED = Need(gpu=GpuNeed(kind="T4", count=1), work="fp16", spot="only", ttl_s=60, budget_usd=1.0)
SERVER = Server(
    id="course-1-2",
    provider="course",
    lab="digits",
    lab_id="0f1e2d3c4b5a",
    alias="digits",
    endpoint=Endpoint(host="192.0.2.7", port=2222),
    offer=Offer(provider="course", type="small", gpu_count=1, price_usd_per_hour=0.5, spot=True),
    created_at=1.0,
    state="running",
    deadline_at=9.0,
)
HELLO = Hello(
    student="ada",
    now=5,
    rules=DeadlineStatus(due_at=9, closes_at=None, accepted=True),
    due="1970-01-01T00:00:09Z",
    late=0,
    penalty=10,
    max_bytes=100,
    receiver="ed25519:00",
    number=2,
)


@pytest.mark.parametrize(("record", "value"), PAIRS)
def test_a_record_has_the_fields_and_the_defaults_of_its_value(
    record: Any, value: type[Value]
) -> None:
    fields = msgspec.structs.fields(value)
    assert record._fields == tuple(field.name for field in fields)
    assert list(to_json(record._make(record._fields))) == [field.encode_name for field in fields]
    defaults = {
        field.name: field.default
        if field.default_factory is msgspec.NODEFAULT
        else field.default_factory()
        for field in fields
        if not field.required
    }
    # A field that the value's own JSON lacks is None in a record.
    plain = {name: None if one is msgspec.UNSET else one for name, one in defaults.items()}
    assert to_json(record._field_defaults) == to_json(msgspec.to_builtins(plain))


@pytest.mark.parametrize("more", [{}, {"oom_limit_bytes": 0}, {"oom_limit_bytes": 1024}])
def test_a_run_keeps_its_memory_limit_and_that_it_had_none(more: dict[str, int]) -> None:
    run = Run(id="night", lab_id="0f1e2d3c4b5a", server_id="srv-1", state="lost", **more)
    line = encode(make_record(kept_labs.KeptRunRecord, run))
    assert parse_record(Run, decode(kept_labs.KeptRunRecord, line)) == run


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (keeper.NeedRecord, NEED),
        (keeper.SeatServerRecord, SERVER),
        (receiver.ReceiverGreetingRecord, HELLO),
    ],
)
def test_a_value_is_sent_as_its_own_json(kind: Any, value: Value) -> None:
    """Earlier versions of labctl send and read the value itself."""
    line = encode(make_record(kind, value))
    assert json.loads(line) == json.loads(msgspec.json.encode(value))
    assert msgspec.json.decode(line, type=type(value)) == value
    assert parse_record(type(value), decode(kind, msgspec.json.encode(value))) == value


def test_a_value_that_its_type_does_not_allow_is_a_message_error() -> None:
    with pytest.raises(MessageError, match="state"):
        parse_record(Server, make_record(keeper.SeatServerRecord, SERVER)._replace(state="happy"))
