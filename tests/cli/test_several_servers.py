"""What commands print about a lab that has several servers, or had more of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from labctl import Lab
from labctl.cli.bandwidth import print_result
from labctl.config.member_ids import make_member_id
from labctl.errors import UsageError
from labctl.insight.bandwidth import AllReduce, Bandwidth
from labctl.model import Endpoint, Offer, Run, Server

HOUR_S = 3600.0


@pytest.fixture
def lab(home: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A lab with three recorded servers at $2/h, since one hour."""
    now = 1000.0 + HOUR_S
    monkeypatch.setattr("labctl.servers.cost.time.time", lambda: now)
    made = Lab.load(home / "digits", environ={"HOME": str(home)})
    offer = Offer(provider="local", type="container", price_usd_per_hour=2.0)
    for rank in range(3):
        server = Server(
            id=f"box-{rank}", provider="local", lab="digits", state="running", offer=offer,
            lab_id=make_member_id(made.id, rank), alias=f"digits-{rank}" if rank else "digits",
            endpoint=Endpoint(host="127.0.0.1"), created_at=1000.0,
        )  # fmt: skip
        made.context.state.save_server(server)
    return made


def write_count(lab: Lab, count: int) -> None:
    path = lab.config.path
    path.write_text(path.read_text() + f"\nserver: {{provider: local, count: {count}}}\n")


@pytest.mark.parametrize("count", [1, 2])
def test_status_lists_servers_beyond_count(lab: Lab, labctl: Any, count: int) -> None:
    write_count(lab, count)
    said = labctl("status").out
    assert "at $6.00/h" in said
    assert "with digits-1: running, container, $2.00/h" in said
    assert "with digits-2: running, container, $2.00/h" in said
    assert f"lab.yaml asks for {count} of these servers; to remove all: labctl down" in said
    assert json.loads(labctl("status", "--json").out)["cost_usd"] == pytest.approx(6.0, abs=0.1)


def test_status_shows_the_others_if_the_first_is_gone(lab: Lab, labctl: Any) -> None:
    write_count(lab, 3)
    assert "asks for" not in labctl("status").out
    lab.context.state.drop_server("box-0")
    said = labctl("status").out
    assert "digits: no server" in said
    assert "with digits-2: running, container, $2.00/h" in said
    assert "asks for" not in said


@pytest.mark.parametrize("words", [("cost",), ("cost", "--all")])
def test_a_run_costs_what_it_costs_on_all_servers(
    lab: Lab, labctl: Any, words: tuple[str, ...]
) -> None:
    write_count(lab, 3)
    for rank in range(3):
        run = Run(
            id="first", lab_id=make_member_id(lab.id, rank), server_id=f"box-{rank}",
            command=("train",), created_at=1000.0, started_at=1000.0, ended_at=1000.0 + HOUR_S / 2,
            state="exited",
        )  # fmt: skip
        lab.context.state.save_run(run)
    rows = [line.split() for line in labctl(*words).out.splitlines() if "first" in line]
    (row,) = rows
    assert row[-1] == "$3.00"


def test_what_needs_one_server_names_another_command(home: Path, lab: Lab, labctl: Any) -> None:
    write_count(lab, 3)
    result = labctl("profile")
    assert result.code == 2
    assert "labctl: profile needs a lab with one server\n" in result.err
    assert "next: labctl top\n" in result.err
    several = Lab.load(home / "digits", environ={"HOME": str(home)})
    with pytest.raises(UsageError, match="-it needs a lab with one server") as caught:
        several.run(["bash"], tty=True)
    assert "labctl exec -- bash" in caught.value.hint


@pytest.mark.parametrize(("gbit_per_s", "is_warned"), [(0.94, True), (1.0, True), (1.1, False)])
def test_bandwidth_warns_of_a_link_of_1_gbit(
    capsys: pytest.CaptureFixture[str], gbit_per_s: float, is_warned: bool
) -> None:
    row = AllReduce(bytes=256 * 1024**2, seconds=3.4, bus_bytes_per_s=gbit_per_s * 1e9 / 8)
    result = Bandwidth(
        rows=(row,), processes=4, servers=2, device="CPU", backend="gloo",
        interface="eth0", link_bits_per_s=1e9,
    )  # fmt: skip
    print_result(result)
    said = capsys.readouterr().out
    assert re.search(rf"256 MiB +3.4 s +{gbit_per_s:.2f} Gbit/s", said)
    assert ("Such a link is slow for a training on several servers." in said) == is_warned
    command = "  labctl estimate --train --data-parallel 4 --link 1gbit\n"
    assert said.endswith(command) == is_warned
    one_server = msgspec.structs.replace(result, servers=1, interface="")
    print_result(one_server)
    assert "slow" not in capsys.readouterr().out
