from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
import pytest
import yaml

from labctl.commands import ansible
from labctl.commands.probe import NOT_INSTALLED, SCRIPT
from labctl.errors import LabError, PolicyError
from labctl.events import Event, Note, Question, SilentReporter
from labctl.model import Endpoint, Gpu, GpuNeed, Need, Offer, Server, ServerFacts
from labctl.servers.gpus import OTHER_SERVER, choose_gpus_option, is_gpu_model
from labctl.servers.playbooks import read_event, run_playbook
from labctl.servers.prepare import playbook_hash, prepare
from labctl.transports import Result

PLAYBOOKS = Path(__file__).resolve().parents[2] / "playbooks"
MIB = 1024**2

T4 = Gpu(name="Tesla T4", uuid="GPU-1", memory_bytes=15360 * MIB)
A100 = Gpu(name="NVIDIA A100-SXM4-80GB", uuid="GPU-2", memory_bytes=81920 * MIB)
A10G = Gpu(name="NVIDIA A10G", uuid="GPU-3", memory_bytes=23028 * MIB)

CPU = ServerFacts(user="alice", uid=1000, python="3.11.2", tmux="3.3a", docker="27.3.1")


class Recorded:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def confirm(self, decision: Question) -> bool:
        return decision.default

    @property
    def notes(self) -> list[Note]:
        return [event for event in self.events if isinstance(event, Note)]


def need(kind: str, count: int = 1, min_memory_bytes: int = 0) -> Need:
    return Need(gpu=GpuNeed(kind=kind, count=count, min_memory_bytes=min_memory_bytes))


def with_gpus(*gpus: Gpu, runtime: bool = True) -> ServerFacts:
    return msgspec.structs.replace(CPU, gpus=gpus, nvidia_runtime=runtime)


def test_auto_on_a_cpu_server_says_so() -> None:
    reporter = Recorded()
    assert choose_gpus_option(Need(), CPU, reporter.emit) == ""
    assert [note.text for note in reporter.notes] == ["No GPU on this server; using the CPU."]


def test_auto_takes_a_gpu_without_a_word() -> None:
    reporter = Recorded()
    assert choose_gpus_option(Need(), with_gpus(T4), reporter.emit) == "all"
    assert reporter.events == []


def test_auto_with_a_gpu_that_containers_cannot_use() -> None:
    reporter = Recorded()
    assert choose_gpus_option(Need(), with_gpus(T4, runtime=False), reporter.emit) == ""
    (note,) = reporter.notes
    assert note.level == "warning"
    assert "Tesla T4" in note.text
    assert "NVIDIA Container Toolkit" in note.text


def test_none_never_takes_one() -> None:
    reporter = Recorded()
    assert choose_gpus_option(need("none", 0), with_gpus(T4), reporter.emit) == ""
    assert reporter.events == []


@pytest.mark.parametrize(
    ("asked", "facts"),
    [
        (need("any"), with_gpus(T4)),
        (need("T4"), with_gpus(T4)),
        (need("a100", 2), with_gpus(A100, A100)),
        (need("A100-80GB"), with_gpus(A100)),
        (need("any", 1, 24 * 1024**3), with_gpus(A10G)),  # sold as 24 GB, shows 22.5 GiB
        (need("any", 1, 16 * 1024**3), with_gpus(T4)),
    ],
)
def test_a_need_that_the_server_meets(asked: Need, facts: ServerFacts) -> None:
    assert choose_gpus_option(asked, facts) == "all"


@pytest.mark.parametrize(
    ("asked", "facts", "words"),
    [
        (need("any"), CPU, "the server has none"),
        (need("T44"), CPU, "labctl knows no GPU named T44; did you mean T4?"),
        (need("A1000"), with_gpus(T4), "did you mean A100?"),
        (need("A100"), with_gpus(T4), "Tesla T4 (15.0 GiB)"),
        (need("A10"), with_gpus(A100), "NVIDIA A100-SXM4-80GB (80.0 GiB)"),
        (need("T4", 2), with_gpus(T4), "Tesla T4 (15.0 GiB)"),
        (need("any", 1, 24 * 1024**3), with_gpus(T4), "Tesla T4 (15.0 GiB)"),
        (need("any"), with_gpus(T4, runtime=False), "NVIDIA Container Toolkit"),
    ],
)
def test_a_need_that_the_server_does_not_meet(asked: Need, facts: ServerFacts, words: str) -> None:
    with pytest.raises(PolicyError) as caught:
        choose_gpus_option(asked, facts)
    assert words in f"{caught.value.what}\n{caught.value.why}"
    assert caught.value.hint


@pytest.mark.parametrize(
    "kind", ["T4", "A10", "H20", "RTX4090", "a100-80gb", "RTX3090", "GTX1080TI"]
)
def test_a_gpu_that_exists_is_not_taken_for_another_one(kind: str) -> None:
    with pytest.raises(PolicyError) as caught:
        choose_gpus_option(need(kind), CPU)
    assert not caught.value.why


@pytest.mark.parametrize(
    ("kind", "name", "same"),
    [
        ("T4", "Tesla T4", True),
        ("A10", "NVIDIA A100-SXM4-40GB", False),
        ("A10", "NVIDIA A10G", False),
        ("L4", "NVIDIA L40S", False),
        ("RTX4090", "NVIDIA GeForce RTX 4090", True),
        ("rtx-4090", "NVIDIA GeForce RTX 4090", True),
        ("4090", "NVIDIA GeForce RTX 4090", True),
        ("RTX A6000", "NVIDIA RTX A6000", True),
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("A100-80GB", "NVIDIA A100-SXM4-40GB", False),
        ("", "Tesla T4", True),
    ],
)
def test_names_of_gpus(kind: str, name: str, same: bool) -> None:
    assert is_gpu_model(kind, name) is same


class Answering:
    """A server that answers the probe with a recorded reply, and anything else with an error."""

    def __init__(self, facts_reply: str, noise: str = "") -> None:
        self.endpoint = Endpoint(host="gpu1.lab.example", user="alice")
        self.asked: list[str] = []
        self._reply = facts_reply
        self._noise = noise

    def run(self, line: object, *, stdin: bytes = b"", **_: object) -> Result:
        assert stdin == SCRIPT.encode()
        self.asked.append(str(line))
        return Result(code=0, stdout=self._reply, noise=self._noise)

    def stream(self, line: object, **_: object) -> int:
        raise AssertionError("a probe is not streamed")

    def close(self) -> None:
        raise AssertionError("nothing was changed, so the connection may stay")


SERVER = Server(
    id="static-1",
    provider="static",
    lab="digits",
    lab_id="lab-1",
    alias="digits",
    endpoint=Endpoint(host="gpu1.lab.example", user="alice"),
    offer=Offer(provider="static", type="machine"),
    created_at=0.0,
)


def prepared(
    facts: ServerFacts | None, tmp_path: Path, reply: str = "", noise: str = ""
) -> list[Note]:
    """The Notes of a `prepare` that must not start Ansible."""
    reporter, transport = Recorded(), Answering(reply, noise)
    prepare(
        transport,
        SERVER,
        facts,
        playbooks_dir=PLAYBOOKS,
        ssh_config=tmp_path / "config",
        reporter=reporter,
    )
    assert len(transport.asked) == (facts is None)
    assert not (tmp_path / "prepare.log").exists()
    return reporter.notes


def test_nothing_missing_needs_nothing(tmp_path: Path) -> None:
    assert prepared(CPU, tmp_path) == []


def test_stamp_and_only_the_daemon_down_is_told(tmp_path: Path) -> None:
    down = msgspec.structs.replace(
        CPU,
        docker="",
        docker_fault="silent",
        docker_error="the daemon does not answer: Is the docker daemon running?.",
        sudo=True,
        stamp=playbook_hash(PLAYBOOKS),
    )
    (note,) = prepared(down, tmp_path)
    assert note.text.startswith("no run can start yet: Docker Engine is installed, but ")
    assert "sudo systemctl enable --now docker" in note.text
    assert "daemon running? To fix it:" in note.text


def test_gpu_without_runtime_and_without_sudo_stays_usable(tmp_path: Path) -> None:
    (note,) = prepared(with_gpus(T4, runtime=False), tmp_path)
    assert "nvidia-container-toolkit 1.17.8" in note.text
    assert "no run can start" not in note.text


def test_facts_are_probed_where_none_are_given(tmp_path: Path) -> None:
    reply = (
        "=== labctl probe ===\npython=3.11.2\ntmux=tmux 3.3a\n"
        "docker_said=labctl-engine 27.3.1\n=== labctl probe end ===\n"
    )
    assert prepared(None, tmp_path, reply, noise="Welcome!\n") == []


def test_without_sudo_the_administrator_gets_exact_lines(tmp_path: Path) -> None:
    bare = ServerFacts(
        os="Debian GNU/Linux 12",
        user="alice",
        uid=1000,
        docker_fault="missing",
        docker_error=NOT_INSTALLED,
    )
    with pytest.raises(PolicyError) as caught:
        prepared(bare, tmp_path)
    assert caught.value.why.splitlines() == [
        "- Docker Engine is not installed",
        "- the account alice must be in the group docker",
        "- tmux is not installed",
        "- python3 is not installed",
        "the account alice may not use sudo without a password.",
        "An administrator of gpu1.lab.example must run there:",
        "    sudo apt-get install --yes docker.io tmux python3",
        "    sudo usermod --append --groups docker alice",
    ]
    assert caught.value.hint.splitlines()[1:] == [
        "labctl inventory > hosts",
        f"ansible-playbook -i hosts {PLAYBOOKS / 'server.yml'} -K",
    ]


def test_stamp_follows_content_and_names_only(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        (folder / "roles").mkdir(parents=True)
        (folder / "server.yml").write_text("one")
        (folder / "roles" / "main.yml").write_text("two")
    (second / "__pycache__").mkdir()
    (second / "__pycache__" / "x.pyc").write_bytes(b"\0")
    assert playbook_hash(first) == playbook_hash(second)
    (second / "roles" / "main.yml").write_text("three")
    assert playbook_hash(first) != playbook_hash(second)
    assert ansible.compute_stamp({"a": b"x", "b": b""}) != ansible.compute_stamp(
        {"a": b"", "b": b"x"}
    )


def test_playbook_argv() -> None:
    argv = ansible.playbook_argv(
        "/venv/bin/python",
        Path("/data/playbooks"),
        Path("/tmp/l/hosts"),
        home=Path("/tmp/l"),
        locale="C.UTF-8",
    )
    start = argv.index("/venv/bin/python")
    assert argv[0] == "env"
    assert argv[start:] == [
        *("/venv/bin/python", "-P", "-m", "ansible", "playbook"),
        *("--inventory", "/tmp/l/hosts", "/data/playbooks/server.yml"),
    ]
    settings = dict(word.split("=", 1) for word in argv[1:start])
    assert settings["ANSIBLE_HOST_KEY_CHECKING"] == "True"
    assert settings["ANSIBLE_CONFIG"] == "/data/playbooks/ansible.cfg"
    assert settings["ANSIBLE_STDOUT_CALLBACK"] == "labctl_events"
    assert settings["LC_ALL"] == "C.UTF-8"


def test_inventory_is_yaml_that_names_each_servers_own_config() -> None:
    hosts = [
        ansible.Host(
            alias="digits", ssh_config=Path("/Users/a b/ssh/config"), user="alice", stamp="abc"
        ),
        ansible.Host(alias="0x10", ssh_config=Path("/s/config"), user="root"),
    ]
    found = yaml.safe_load(ansible.build_inventory(hosts))["labctl"]["hosts"]
    assert shlex.split(found["digits"]["ansible_ssh_common_args"]) == [
        "-F",
        "/Users/a b/ssh/config",
    ]
    assert found["digits"]["lab_server_stamp"] == "abc"
    assert found["0x10"] == {"ansible_ssh_common_args": "-F /s/config", "ansible_become": False}
    assert yaml.safe_load(ansible.build_inventory([])) == {"labctl": {"hosts": {}}}


def test_socket_of_ansibles_master_fits_on_a_mac() -> None:
    """ssh adds 17 bytes while it binds; macOS allows 104 with the zero byte."""
    home = Path("/tmp/labctl-a-12345678")
    folder = ansible.build_environment(PLAYBOOKS, home, "C.UTF-8")["ANSIBLE_SSH_CONTROL_PATH_DIR"]
    assert len(f"{folder}/0123456789") + 17 < 104


@pytest.mark.parametrize("line", [b"PLAY RECAP ***", b"", b"{", b"[1]", b'{"event": 3}', b"{}"])
def test_other_output_of_ansible_is_no_event(line: bytes) -> None:
    assert read_event(line) is None


def test_a_server_that_is_ended_beneath_its_preparation_is_named(tmp_path: Path) -> None:
    """Its directory went with it, and does not come back."""
    gone = tmp_path / "ssh" / "i-1"
    host = ansible.Host(alias="digits", ssh_config=gone / "config", user="student")
    with pytest.raises(LabError, match="i-1 was removed while it was being prepared"):
        run_playbook(host, tmp_path, SilentReporter())
    assert not gone.exists()


def test_an_option_is_not_blamed_on_lab_yaml() -> None:
    with pytest.raises(PolicyError) as caught:
        choose_gpus_option(need("A100", 1), with_gpus(T4), hint=OTHER_SERVER)
    assert caught.value.hint == OTHER_SERVER
