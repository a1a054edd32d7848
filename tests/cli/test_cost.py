"""`labctl cost`: the time and cost of servers and runs, as a person reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from labctl import Lab
from labctl.model import Endpoint, Offer, Server


@pytest.mark.parametrize(
    ("price", "shown", "total"),
    [
        (0.0, ["2 d", "free", "nothing"], "total: nothing"),
        (0.19, ["2 d", "$0.19/h", "$9.12"], "total: $9.12"),
    ],
)
def test_a_free_server_has_no_amounts(
    labctl: Any,
    home: Path,
    price: float,
    shown: list[str],
    total: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("labctl.servers.cost.time.time", lambda: 1000.0 + 48 * 3600)
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    offer = Offer(provider="local", type="container", price_usd_per_hour=price)
    server = Server(
        id="box", provider="local", lab="digits", lab_id=lab.id, alias="digits", state="running",
        endpoint=Endpoint(host="127.0.0.1"), offer=offer, created_at=1000.0,
    )  # fmt: skip
    lab.context.state.save_server(server)
    lab.context.state.close()
    lines = labctl("cost").out.splitlines()
    assert lines[0].split() == ["SERVER", "TYPE", "TIME", "PRICE", "COST", "SAVED", "IDLE"]
    row = lines[1].replace("2 d, up", "2 d").split("  ")
    assert [cell.strip() for cell in row if cell.strip()][2:5] == shown
    assert lines[-1] == total
