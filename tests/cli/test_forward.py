"""Background forwards: which ones `--stop` ends, and which it leaves open."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from labctl import Lab
from labctl.model import Endpoint, Forward, Offer, Server, Service


def put_server_on_record(lab: Lab, server_id: str, name: str, lab_id: str) -> None:
    server = Server(
        id=server_id, provider="local", lab=name, lab_id=lab_id, alias=name, state="running",
        endpoint=Endpoint(host="127.0.0.1"), offer=Offer(provider="local", type="container"),
        created_at=1.0,
    )  # fmt: skip
    lab.context.state.save_server(server)


def hold(lab: Lab, forward_id: str, server_id: str) -> subprocess.Popen[bytes]:
    """Put a forward on record, with a process that has the command line of its holder."""
    words = [f"python -m labctl.services.background_forwards {forward_id}", "-c", "echo; read line"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, executable="/bin/sh", stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    process.stdout.readline()  # the kernel shows no command line during the exec
    forward = Forward(
        id=forward_id, server_id=server_id, service="web", local_port=8000, remote_port=8000,
        url="http://127.0.0.1:8000/", pid=process.pid,
    )  # fmt: skip
    lab.context.state.save_forward(forward)
    return process


@pytest.fixture
def held(home: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """A forward of the lab "digits", and one of another lab."""
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    put_server_on_record(lab, "box-1", "digits", lab.id)
    put_server_on_record(lab, "box-2", "faces", "0123456789ab")
    with ExitStack() as stack:
        processes = {
            "f1": stack.enter_context(hold(lab, "f1", "box-1")),
            "f2": stack.enter_context(hold(lab, "f2", "box-2")),
        }
        lab.context.state.close()
        yield processes
        for process in processes.values():
            process.kill()


def list_open(held: dict[str, subprocess.Popen[bytes]]) -> list[str]:
    return [name for name, process in held.items() if process.poll() is None]


@pytest.mark.parametrize("names", [(), ("web",)])
def test_stop_ends_the_forwards_of_this_lab(
    labctl: Any, held: dict[str, subprocess.Popen[bytes]], names: tuple[str, ...]
) -> None:
    stopped = labctl("forward", "--stop", *names, "--json")
    assert [one["id"] for one in json.loads(stopped.out)["forwards"]] == ["f1"]
    assert list_open(held) == ["f2"]
    again = labctl("forward", "--stop")
    assert (again.code, again.out) == (0, "")
    assert "Other labs have 1. To stop all: labctl forward --stop --all" in again.err


def test_stop_all_ends_the_forwards_of_every_lab(
    labctl: Any, held: dict[str, subprocess.Popen[bytes]]
) -> None:
    listed = labctl("forward", "--list").out.splitlines()
    assert [line.split()[:3] for line in listed[1:]] == [
        ["f1", "digits", "web"],
        ["f2", "faces", "web"],
    ]
    assert labctl("forward", "--stop", "--all").code == 0
    assert list_open(held) == []
    assert labctl("forward", "--list").err == "No background forwards.\n"


def test_the_list_shows_the_whole_url_on_a_narrow_screen(
    labctl: Any, home: Path, held: dict[str, subprocess.Popen[bytes]], monkeypatch: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    assert "http://127.0.0.1:8000/" in labctl("forward", "--list").out


def test_a_misspelled_forward_is_corrected(
    labctl: Any, held: dict[str, subprocess.Popen[bytes]]
) -> None:
    said = labctl("forward", "--stop", "wbe")
    assert said.code == 4
    assert said.err == (
        "labctl: there is no forward wbe; did you mean web?\n  next: labctl forward --stop web\n"
    )
    assert list_open(held) == ["f1", "f2"]


def test_it_says_that_no_forward_is_open(labctl: Any, home: Path) -> None:
    said = labctl("forward", "--stop", "tensorboard")
    assert "there is no forward tensorboard\n  no forward is open in the background\n" in said.err


def test_an_id_names_a_forward_of_any_lab(
    labctl: Any, held: dict[str, subprocess.Popen[bytes]]
) -> None:
    assert labctl("forward", "--stop", "f2").code == 0
    assert list_open(held) == ["f1"]


def test_forwards_are_listed_and_stopped_from_any_directory(
    labctl: Any,
    home: Path,
    held: dict[str, subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(home)
    said = labctl("forward", "--list")
    assert said.code == 0, said.err
    assert [line.split()[:2] for line in said.out.splitlines()[1:]] == [
        ["f1", "digits"],
        ["f2", "faces"],
    ]
    assert labctl("forward", "--stop").code == 2, "without a lab, it would stop none"
    assert labctl("forward", "--stop", "f1").code == 0
    assert list_open(held) == ["f2"]
    assert labctl("forward", "--stop", "--all").code == 0
    assert list_open(held) == []


def test_all_without_stop_is_refused(labctl: Any, home: Path) -> None:
    refused = labctl("forward", "--all", "tensorboard")
    assert refused.code == 2
    assert "next: labctl forward --stop --all" in refused.err


def test_the_list_is_of_all_labs_already(labctl: Any, home: Path) -> None:
    refused = labctl("forward", "--list", "--all")
    assert refused.code == 2
    assert "--list always includes the background forwards of all labs" in refused.err
    assert "next: labctl forward --list\n" in refused.err


def test_the_list_shows_the_token_that_opens_jupyter(
    labctl: Any, held: dict[str, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab.load(".")
    (forward,) = lab.context.state.list_forwards("box-1")
    url = "http://127.0.0.1:8888/lab"
    jupyter = msgspec.structs.replace(forward, service="jupyter", url=url)
    lab.context.state.save_forward(jupyter)
    lab.context.state.close()
    service = Service(name="jupyter", port=8888, token="0f1e2d3c")
    monkeypatch.setattr(
        "labctl.services.several_forwards.list_services", lambda remote, lab, lab_id: [service]
    )
    monkeypatch.setattr("labctl.servers.context.LabContext.open_agent", lambda self, server: None)
    rows = labctl("forward", "--list").out.splitlines()
    assert rows[1].endswith(f" jupyter  {url}?token=0f1e2d3c")
    listed = json.loads(labctl("forward", "--list", "--json").out)["forwards"]
    assert listed[0]["url"] == f"{url}?token=0f1e2d3c"
