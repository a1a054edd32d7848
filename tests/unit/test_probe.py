from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labctl.commands.probe import (
    BEGIN,
    END,
    NOT_INSTALLED,
    SCRIPT,
    list_admin_commands,
    list_missing,
    parse,
)
from labctl.errors import LabError
from labctl.model import Gpu, ServerFacts

LAB_SERVER = ServerFacts(
    os="Debian GNU/Linux 12 (bookworm)",
    user="alice",
    uid=1000,
    python="3.11.2",
    tmux="3.3a",
    docker="20.10.24",
)
BARE = ServerFacts(
    os="Ubuntu 24.04.1 LTS",
    user="alice",
    uid=1000,
    docker_fault="missing",
    docker_error=NOT_INSTALLED,
)
T4 = Gpu(name="Tesla T4", uuid="GPU-1", memory_bytes=15360 * 1024**2, driver="550.54")


def replace(facts: ServerFacts, **changes: object) -> ServerFacts:
    return msgspec.structs.replace(facts, **changes)


def reply(*lines: str) -> str:
    return "\n".join((BEGIN, *lines, END)) + "\n"


def run_script(shell: list[str], path: Path | None = None, **environment: str) -> str:
    """What the real script prints, with the programs in `path` before the machine's own."""
    found = f"{path}:{os.environ['PATH']}" if path else os.environ["PATH"]
    done = subprocess.run(
        [*shell, "-s"],
        input=SCRIPT,
        capture_output=True,
        text=True,
        check=True,
        env={"HOME": str(Path.home()), "PATH": found, **environment},
    )
    return done.stdout


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


SHELLS = [
    [name, *options]
    for name, *options in (
        ["dash"],
        ["bash", "--posix"],
        ["busybox", "sh"],
        ["zsh", "--emulate", "sh"],
    )
    if shutil.which(name)
]


@pytest.mark.parametrize("shell", SHELLS, ids=lambda words: words[0])
def test_script_finds_this_machine(shell: list[str]) -> None:
    facts = parse(run_script(shell))
    me = pwd.getpwuid(os.getuid())
    assert (facts.user, facts.uid, facts.gid) == (me.pw_name, os.getuid(), os.getgid())
    assert facts.arch == os.uname().machine
    assert facts.home == str(Path.home())
    if sys.platform == "linux":
        assert facts.kernel == os.uname().release
        assert facts.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert facts.uptime_s > 0
        assert facts.memory_bytes > 2**20
        assert facts.home_filesystem
    assert facts.cpus >= 1
    assert facts.disk_free_bytes > 0


def test_script_reads_nvidia_smi(tmp_path: Path) -> None:
    program(
        tmp_path,
        "nvidia-smi",
        "echo 'GPU-aaaa, 15360, 550.54.15, Tesla T4'; echo 'GPU-bbbb, [N/A], 580.1, NVIDIA GB10'",
    )
    program(tmp_path, "nvidia-container-runtime-hook", "exit 1")
    facts = parse(run_script(["sh"], tmp_path))
    assert facts.gpus == (
        Gpu(name="Tesla T4", uuid="GPU-aaaa", memory_bytes=15360 * 1024**2, driver="550.54.15"),
        Gpu(name="NVIDIA GB10", uuid="GPU-bbbb", memory_bytes=0, driver="580.1"),
    )
    assert facts.nvidia_runtime


def test_a_driver_that_fails_is_no_gpu(tmp_path: Path) -> None:
    words = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver, a, b, c"
    program(tmp_path, "nvidia-smi", f'echo "{words}"; exit 9')
    assert parse(run_script(["sh"], tmp_path)).gpus == ()


def test_nvidia_runtime_known_to_docker_only(tmp_path: Path) -> None:
    program(
        tmp_path,
        "docker",
        'case $1 in version) echo "labctl-engine 27.3.1" ;; info) echo "runc nvidia " ;; esac',
    )
    facts = parse(run_script(["sh"], tmp_path))
    assert (facts.docker, facts.docker_error) == ("27.3.1", "")
    assert facts.nvidia_runtime


@pytest.mark.parametrize(
    ("said", "fault", "error"),
    [
        (
            "permission denied while trying to connect to the Docker daemon socket",
            "denied",
            "permission denied",
        ),
        ("Got permission denied while trying to connect", "denied", "permission denied"),
        (
            "Cannot connect to the Docker daemon at unix:///var/run/docker.sock.",
            "silent",
            "the daemon does not answer: "
            "Cannot connect to the Docker daemon at unix:///var/run/docker.sock.",
        ),
        (
            "Error response from daemon: server 500",
            "silent",
            "the daemon does not answer: Error response from daemon: server 500",
        ),
        (
            "unknown flag; podman 4.3",
            "missing",
            "not installed (the docker command there is Podman)",
        ),
    ],
)
def test_why_docker_does_not_answer(said: str, fault: str, error: str) -> None:
    facts = parse(reply(f"docker_said=labctl-engine  {said}"))
    assert (facts.docker, facts.docker_fault, facts.docker_error) == ("", fault, error)


def test_what_docker_says_on_stderr_is_in_the_reply(tmp_path: Path) -> None:
    program(tmp_path, "docker", "echo; echo 'Got permission denied while trying' >&2; exit 1")
    assert parse(run_script(["sh"], tmp_path)).docker_fault == "denied"


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="needs Linux's /proc")
def test_a_daemon_that_starts_is_waited_for(tmp_path: Path) -> None:
    """It refuses twice while a process called dockerd is there, then answers."""
    program(
        tmp_path,
        "docker",
        f'echo . >> {tmp_path}/asked; test "$(wc -l < {tmp_path}/asked)" -ge 3 || '
        '{ echo "Cannot connect" >&2; exit 1; }; echo "labctl-engine 27.3.1"',
    )
    shutil.copy2(shutil.which("sleep") or "", tmp_path / "dockerd")
    with subprocess.Popen([tmp_path / "dockerd", "60"]) as daemon:
        try:
            facts = parse(run_script(["sh"], tmp_path))
        finally:
            daemon.kill()
    assert facts.docker == "27.3.1"


def test_nothing_on_stdin_is_eaten(tmp_path: Path) -> None:
    """A program that reads its input must not swallow the rest of the script."""
    for name in ("docker", "nvidia-smi", "tmux", "sudo", "python3"):
        program(tmp_path, name, "cat")
    assert parse(run_script(["sh"], tmp_path)).cpus >= 1


@pytest.mark.parametrize("banner", ["Welcome to the lab!\n", "no newline at its end", "a\nb=c\n"])
def test_banner_before_the_reply(banner: str) -> None:
    facts = parse(banner + reply("user=alice", "uid=1000"))
    assert (facts.user, facts.uid) == ("alice", 1000)


def test_versions_are_cut_out_of_what_programs_say() -> None:
    facts = parse(
        reply(
            "python=3.11.2",
            "tmux=tmux next-3.6",
            "docker_said=labctl-engine 20.10.24+dfsg1",
        )
    )
    assert (facts.python, facts.tmux) == ("3.11.2", "3.6")
    assert facts.docker == "20.10.24+dfsg1"


@pytest.mark.parametrize(
    ("df", "stat", "found"),
    [
        ("nfs4", "nfs", "nfs4"),
        ("ext4", "ext2/ext3", "ext4"),
        ("", "v9fs", "9p"),
        ("-", "nfs", "nfs"),
        ("fuse.sshfs", "fuseblk", "fuse.sshfs"),
    ],
)
def test_filesystem_of_the_home(df: str, stat: str, found: str) -> None:
    facts = parse(reply(f"home_filesystem={df}", f"home_filesystem_stat={stat}"))
    assert facts.home_filesystem == found


def test_memory_is_the_lesser_of_machine_and_cgroup() -> None:
    assert parse(reply("memory_kib=1048576", "memory_limit=max")).memory_bytes == 2**30
    assert parse(reply("memory_kib=1048576", "memory_limit=536870912")).memory_bytes == 2**29
    assert parse(reply("memory_kib=1048576", f"memory_limit={2**63}")).memory_bytes == 2**30


@pytest.mark.parametrize("stdout", ["", "This account is currently not available.\n", BEGIN, END])
def test_no_reply_is_an_error_with_what_was_said(stdout: str) -> None:
    with pytest.raises(LabError) as caught:
        parse(stdout, "")
    assert stdout.strip() in caught.value.why or not stdout


def test_control_characters_of_a_server_are_not_repeated() -> None:
    with pytest.raises(LabError) as caught:
        parse("\x1b[2Jgone", "")
    assert "\x1b" not in caught.value.why


@given(st.text())
def test_any_text_is_facts_or_a_lab_error(text: str) -> None:
    try:
        parse(text)
    except LabError:
        return
    assert BEGIN in text


KEYS = sorted({line.split()[1] for line in SCRIPT.splitlines() if line.startswith("say ")})


@given(
    st.lists(
        st.tuples(st.sampled_from([*KEYS, "gpu", "docker_said", "other"]), st.text(max_size=40))
    )
)
def test_any_reply_is_facts_of_the_declared_types(fields: list[tuple[str, str]]) -> None:
    facts = parse(reply(*(f"{key}={value}" for key, value in fields)))
    assert msgspec.convert(msgspec.to_builtins(facts), ServerFacts) == facts


def test_a_lab_server_lacks_nothing() -> None:
    assert list_missing(LAB_SERVER) == []


def test_a_bare_machine_lacks_everything_with_the_words_for_its_administrator() -> None:
    lacking = list_missing(BARE)
    names = [lack.name for lack in lacking]
    assert names == ["docker", "docker rights", "tmux", "python3"]
    assert list_admin_commands(lacking) == [
        "sudo apt-get install --yes docker.io tmux python3",
        "sudo usermod --append --groups docker alice",
    ]


def test_other_distributions_are_not_told_to_use_apt() -> None:
    lines = list_admin_commands(list_missing(replace(BARE, os="Rocky Linux 9.4 (Blue Onyx)")))
    assert not any("apt-get" in line for line in lines)
    assert "install Docker Engine: https://docs.docker.com/engine/install/" in lines


def test_rights_alone() -> None:
    denied = replace(LAB_SERVER, docker="", docker_fault="denied", docker_error="no rights")
    lacking = list_missing(denied)
    assert [lack.name for lack in lacking] == ["docker rights"]
    assert list_admin_commands(lacking) == ["sudo usermod --append --groups docker alice"]


def test_root_needs_no_group() -> None:
    assert "docker rights" not in [lack.name for lack in list_missing(replace(BARE, uid=0))]


@pytest.mark.parametrize(
    ("version", "enough"), [("3.7.17", False), ("3.8.0", True), ("3.13.1", True)]
)
def test_python_must_be_new_enough(version: str, enough: bool) -> None:
    assert (list_missing(replace(LAB_SERVER, python=version)) == []) is enough


def test_gpu_without_runtime_is_missing_but_optional() -> None:
    lacking = list_missing(replace(LAB_SERVER, gpus=(T4,)))
    assert [(lack.name, lack.optional) for lack in lacking] == [("nvidia runtime", True)]
    assert list_missing(replace(LAB_SERVER, gpus=(T4,), nvidia_runtime=True)) == []
