"""A mistake in lab.yaml does not keep a user from inspecting and ending what the lab has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from labctl import Lab
from labctl.config import ensure_lab_id, find_paths
from labctl.errors import ConfigError
from labctl.model import Endpoint, Offer, Server
from labctl.state import State

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from engine_socket import Answer, engine_socket

Labctl = Callable[..., Any]
HOSTS = "static: {hosts: [{alias: gpu1, host: 127.0.0.1, port: 1}]}"
# Each hides something that the record knows: the name, the provider, or the whole file.
FAULTS = {
    "lab: digits\nlimits: {memory: many}\n": "lab.yaml line 2: limits.memory: ",
    "lab: digits\nserver: {provider: a z}\n": "lab.yaml line 2: server.provider: ",
    "lab: 'no name'\n": "lab.yaml line 1: lab: ",
    "lab: digits\n\tserver: {}\n": "lab.yaml line 2: a tab at the start of the line",
    "lab: digits\nrnu: x\nlimit: 1\n": "(and 1 more: labctl config)",
    "": "lab.yaml is empty",
}


@pytest.fixture
def save(home: Path) -> Callable[..., Server]:
    """Record a server of the lab in `home`."""

    def record(provider: str, account: str = "", price: float = 0.0) -> Server:
        server = Server(
            id="gpu1-a", provider=provider, lab="digits", alias="digits", created_at=1.0,
            lab_id=ensure_lab_id(home / "digits"), state="running", account=account,
            endpoint=Endpoint(host="127.0.0.1", port=1),
            offer=Offer(provider=provider, type="box", price_usd_per_hour=price),
        )  # fmt: skip
        with State(find_paths().database) as state:
            state.save_server(server)
        return server

    return record


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Docker Engine on which nothing exists."""

    def answer(method: str, path: str, body: Any) -> Answer | None:
        if path.startswith("/version"):
            return 200, {"ApiVersion": "1.41"}
        return 200, {"Volumes": []} if "/volumes" in path else []

    with engine_socket() as socket:
        socket.answers = answer
        monkeypatch.setenv("DOCKER_HOST", socket.host)
        yield socket


@pytest.mark.parametrize("text", FAULTS)
def test_status_shows_the_recorded_server(
    save: Callable[..., Server], home: Path, labctl: Labctl, text: str
) -> None:
    save("local")
    (home / "digits" / "lab.yaml").write_text(text)
    said = labctl("status")
    assert said.code == 0
    assert said.out.startswith("digits: running (last known), local box")
    assert FAULTS[text] in said.err
    assert said.err.strip().endswith("using what labctl has on record")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("text", FAULTS)
def test_down_ends_the_recorded_server(
    save: Callable[..., Server], engine: Any, home: Path, labctl: Labctl, text: str
) -> None:
    save("local")
    (home / "digits" / "lab.yaml").write_text(text)
    said = labctl("down")
    assert (said.code, FAULTS[text] in said.err) == (0, True)
    assert said.out.endswith("Nothing is left running or billing.\n")
    assert "no server" in labctl("status").out


@pytest.mark.parametrize(
    "command", ["forward --list", "forward --stop", "orphans --provider local", "cost"]
)
@pytest.mark.parametrize("text", FAULTS)
def test_lists_need_no_file(
    engine: Any, home: Path, labctl: Labctl, text: str, command: str
) -> None:
    (home / "digits" / "lab.yaml").write_text(text)
    said = labctl(*command.split())
    assert said.code == 0
    assert FAULTS[text] in said.err or ("provider" in text and "--provider" in command)


@pytest.mark.parametrize("fault", ["limits: {memory: many}", "run: {a: b}"])
def test_down_uses_the_settings_that_can_be_read(
    save: Callable[..., Server], home: Path, labctl: Labctl, fault: str
) -> None:
    save("static")
    text = f"lab: digits\nserver: {{provider: static, {HOSTS}}}\n{fault}\n"
    (home / "digits" / "lab.yaml").write_text(text)
    said = labctl("down", "--yes")
    assert "lab.yaml line 3: " in said.err
    assert "gpu1" in said.err.partition("labctl:")[2]  # it was tried, and does not answer
    assert "last known" in labctl("status").out


@pytest.mark.parametrize(
    "text",
    [
        "lab: digits\nserver: {provider: static, static: {hosts: 3}}\n",
        "lab: digits\n\tserver: {}\n",
        "",
    ],
)
def test_without_the_address_of_a_machine_the_record_stays(
    save: Callable[..., Server], home: Path, labctl: Labctl, text: str
) -> None:
    """A machine without an account that cannot be found does not count as ended."""
    save("static")
    (home / "digits" / "lab.yaml").write_text(text)
    said = labctl("down", "--yes")
    assert (said.code, said.out) == (2, "")
    assert "lab.yaml" in said.err
    assert "last known" in labctl("status").out


def test_without_a_record_the_file_must_name_the_provider(home: Path, labctl: Labctl) -> None:
    (home / "digits" / "lab.yaml").write_text("lab: digits\nserver: {provider: awz}\n")
    said = labctl("down", "--yes")
    assert (said.code, said.out) == (2, "")
    assert "there is no provider called 'awz'" in said.err


def test_the_account_on_record_protects_a_server_of_a_cloud(
    save: Callable[..., Server], home: Path
) -> None:
    save("aws", account="123456789012", price=1.0)
    (home / "digits" / "lab.yaml").write_text("lab: digits\n\tserver: {}\n")
    lab = Lab.load(home / "digits", environ={"HOME": str(home)}, skips_faults=True)
    assert lab.config.server.provider == "aws"
    with pytest.raises(ConfigError):
        Lab.load(home / "digits", environ={"HOME": str(home)})


@pytest.mark.parametrize("words", ["orphans --provider awz", "up", "push", "config"])
def test_other_commands_and_wrong_options_fail(home: Path, labctl: Labctl, words: str) -> None:
    (home / "digits" / "lab.yaml").write_text("lab: digits\nlimits: {memory: many}\n")
    said = labctl(*words.split())
    assert (said.code, said.out) == (2, "")


def test_what_can_be_read_of_a_faulty_section_is_used(home: Path) -> None:
    text = "lab: digits\nserver: {provider: aws, aws: {profile: work, regoins: [eu-west-1]}}\n"
    (home / "digits" / "lab.yaml").write_text(text)
    with pytest.raises(ConfigError):
        Lab.load(home / "digits", environ={"HOME": str(home)}, skips_faults=True)
    lab_id = ensure_lab_id(home / "digits")
    server = Server(
        id="i-1", provider="aws", lab="digits", lab_id=lab_id, alias="digits", created_at=1.0,
        endpoint=Endpoint(host="127.0.0.1"), offer=Offer(provider="aws", type="t"),
        state="running", account="123456789012",
    )  # fmt: skip
    with State(find_paths({"HOME": str(home)}).database) as state:
        state.save_server(server)
    lab = Lab.load(home / "digits", environ={"HOME": str(home)}, skips_faults=True)
    settings: Any = lab.config.server.provider_settings["aws"]
    assert msgspec.to_builtins(settings)["profile"] == "work"


def test_the_next_step_of_an_empty_file_leads_out_of_it(home: Path, labctl: Labctl) -> None:
    (home / "digits" / "lab.yaml").write_text("")
    said = labctl("up")
    assert said.code == 2
    assert said.err.endswith("is required\n  next: echo 'lab: digits' > lab.yaml\n")
    subprocess.run(["sh", "-c", said.err.rpartition("next: ")[2]], check=True)
    assert "digits" in labctl("config").out


def test_status_says_that_a_provider_is_unknown(
    save: Callable[..., Server], home: Path, labctl: Labctl
) -> None:
    (home / "digits" / "lab.yaml").write_text("lab: digits\nserver: {provider: locall}\n")
    said = labctl("status")
    assert (said.code, said.out) == (0, "digits: no server\n  next: labctl up\n")
    assert "lab.yaml line 2: server.provider: there is no provider called 'locall'" in said.err
    assert said.err.endswith("using what labctl has on record\n")
    save("local")
    assert labctl("status").out.startswith("digits: running (last known), local box")


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("./images/*.png", "write 'images', and let your code choose the files"),
        ("sets/[ab]/x", "write 'sets', and let your code choose the files"),
        ("'*.png'", "move the files to a directory, and let your code choose the files"),
    ],
)
def test_a_pattern_of_data_says_which_directory_to_write(
    home: Path, labctl: Labctl, path: str, advice: str
) -> None:
    (home / "digits" / "lab.yaml").write_text(f"lab: digits\ndata:\n  pics: {path}\n")
    output = labctl("up")
    assert output.code == 2
    assert f"is a pattern of names, and data: takes a directory; {advice}\n" in output.err
