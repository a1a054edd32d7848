"""`labctl cost`: the time and cost of servers and runs, as a person reads them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from labctl import Lab
from labctl.cli.estimate_tables import _cost_cells
from labctl.cli.offers import _print_offers
from labctl.insight.offer_costs import CostEstimate
from labctl.model import Endpoint, Offer, Run, Server


@pytest.mark.parametrize(
    ("price", "shown", "total"),
    [
        (0.0, ["2 d", "free", "free"], "total: free"),
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
    _record_server(home, price)
    output = labctl("cost").out
    assert ("IDLE is known only" in output) is (price > 0), "a free server needs no limits"
    lines = output.splitlines()
    assert lines[0].split() == ["SERVER", "TYPE", "TIME", "PRICE", "COST", "SAVED", "IDLE"]
    row = lines[1].replace("2 d, up", "2 d").split("  ")
    assert [cell.strip() for cell in row if cell.strip()][2:5] == shown
    assert lines[-1] == total


@pytest.mark.parametrize(
    ("price", "spot", "headings"),
    [
        (0.0, False, ["SERVER", "TYPE", "TIME", "COST"]),
        (0.19, False, ["SERVER", "TYPE", "TIME", "PRICE", "COST"]),
        (0.19, True, ["SERVER", "TYPE", "TIME", "PRICE", "COST", "SAVED"]),
    ],
)
def test_a_terminal_shows_the_columns_that_have_a_value(
    labctl: Any,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    price: float,
    spot: bool,
    headings: list[str],
) -> None:
    _record_server(home, price, spot)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = click.unstyle(labctl("cost").out).splitlines()
    assert lines[0].split() == headings


def _record_server(home: Path, price: float, spot: bool = False) -> None:
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    offer = Offer(provider="local", type="container", price_usd_per_hour=price, spot=spot)
    server = Server(
        id="box", provider="local", lab="digits", lab_id=lab.id, alias="digits", state="running",
        endpoint=Endpoint(host="127.0.0.1"), offer=offer, created_at=1000.0,
    )  # fmt: skip
    lab.context.state.save_server(server)
    lab.context.state.close()


def test_offers_and_estimates_write_a_price_in_one_form(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = Offer(
        provider="aws", type="g4dn", price_usd_per_hour=0.1749, on_demand_usd_per_hour=0.526,
        week_low_usd_per_hour=0.16, week_high_usd_per_hour=0.2093, spot=True,
    )  # fmt: skip
    free = Offer(provider="local", type="container")
    monkeypatch.setenv("COLUMNS", "120")
    _print_offers([offer, free], 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[3:6] == ["$0.1749/h", "$0.16-0.2093/h", "$0.526/h"]
    assert lines[2].split()[3:6] == ["free", "-", "-"]
    cost = CostEstimate(
        provider="aws", type="g4dn", zone="", spot=True, gpu="T4", gpu_count=1, servers=1,
        gpu_memory_bytes=0, price_usd_per_hour=0.1749, fits=True, hours=None, usd=None,
    )  # fmt: skip
    assert _cost_cells(cost, False)[4] == "$0.1749/h"


def test_offers_of_shared_machines_show_how_many_gpus_are_free(
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpu = Offer(provider="slurm", type="gpu", gpu_name="T4", gpu_count=2, free_gpus=3, all_gpus=6)
    cpu = Offer(provider="slurm", type="cpu", free_gpus=0, all_gpus=0)
    _print_offers([gpu, cpu], 2)
    lines = capsys.readouterr().out.splitlines()
    assert "FREE GPUS" in lines[0]
    assert "2x T4  3 of 6" in lines[1]
    _print_offers([cpu], 1)
    assert "FREE" not in capsys.readouterr().out


def test_offers_fit_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = Offer(
        provider="aws", type="g4dn.12xlarge", zone="us-east-1a", gpu_name="A10G", gpu_count=1,
        gpu_memory_bytes=24 * 10**9, price_usd_per_hour=0.4186, on_demand_usd_per_hour=1.006,
        week_low_usd_per_hour=0.3229, week_high_usd_per_hour=0.4225, spot=True,
    )  # fmt: skip
    monkeypatch.setenv("COLUMNS", "80")
    _print_offers([offer], 1)
    assert "  $1.01/h  spot -58%" in capsys.readouterr().out, "not a terminal"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _print_offers([offer], 1)
    lines = click.unstyle(capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].endswith("$0.4186/h  $0.3229-0.4225/h  spot -58%")
    for width, line in (
        ("72", "g4dn.12xlarge  A10G 22.4 GiB  us-east-1a  $0.4186/h  spot -58%"),
        ("60", "g4dn.12xlarge  A10G 22.4 GiB  $0.4186/h  spot -58%"),
        ("40", "g4dn.12xlarge  $0.4186/h  spot -58%"),
    ):
        monkeypatch.setenv("COLUMNS", width)
        _print_offers([offer], 1)
        assert click.unstyle(capsys.readouterr().out).splitlines()[1] == line


def test_a_recovered_run_counts_on_every_server_that_it_had(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One hour on a server that was reclaimed, half an hour without one, two hours on the next."""
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    clock = [0.0]
    monkeypatch.setattr("labctl.state.time.time", lambda: clock[0])
    monkeypatch.setattr("labctl.servers.cost.time.time", lambda: clock[0])

    def at_hour(hour: float, kind: str, server: str, run: str = "", **detail: float) -> None:
        clock[0] = 1e9 + hour * 3600
        lab.context.state.record(
            kind, lab_id=lab.id, server_id=server, run_id=run, detail=dict(detail)
        )

    at_hour(0, "created", "first", price_usd_per_hour=1.0)
    at_hour(0, "code", "first", "night")
    at_hour(1, "gone", "first")
    at_hour(1.5, "created", "second", price_usd_per_hour=2.0)
    at_hour(1.5, "recovered", "second", "night")
    at_hour(3.5, "terminated", "second")
    run = Run(
        id="night", lab_id=lab.id, server_id="second", state="exited", exit_code=0,
        created_at=1e9, started_at=1e9 + 1.5 * 3600, ended_at=1e9 + 3.5 * 3600,
    )  # fmt: skip
    lab.context.state.save_run(run)
    lab.context.state.close()
    lines = labctl("cost").out.splitlines()
    assert lines[-3].split() == ["night", "second", "and", "1", "before", "it", "3", "h", "$5.00"]
    assert lines[-1] == "total: $5.00"
    (cost,) = json.loads(labctl("cost", "--json").out)["costs"]["runs"]
    assert (cost["server_id"], cost["earlier_server_ids"]) == ("second", ["first"])
    assert (cost["hours"], cost["cost_usd"]) == (3.0, 5.0)
