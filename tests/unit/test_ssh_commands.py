"""What labctl says to OpenSSH, as values; OpenSSH itself reads some of them back."""

from __future__ import annotations

import itertools
import shlex
import subprocess
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labctl.commands import ssh
from labctl.errors import UsageError
from labctl.model import Endpoint
from labctl.transports.ssh_client import find_quick_login_options

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJv3rUsymaY5pzRXGMkdoTCoyrTVNNhqeNPGdNuedeMT"
ENDPOINT = Endpoint(host="203.0.113.7", port=2222, user="student", identity="/keys/a key")


def config(endpoint: Endpoint = ENDPOINT, **other: str) -> str:
    fields = {"known_hosts": "/state/i-1/known_hosts", "runtime_dir": "/tmp/labctl-501", **other}
    return ssh.server_config("I-1", "digits", endpoint, **fields)


def as_ssh_reads(text: str, name: str, tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "config"
    path.write_text(text)
    done = subprocess.run(
        ["ssh", "-G", "-F", str(path), "--", name], capture_output=True, text=True, check=True
    )
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


def test_the_config_of_one_server() -> None:
    assert config() == (
        "# Server I-1.\n"
        "# Written by labctl, which replaces it. Put your changes into your own config.\n"
        "Host digits I-1\n"
        "    HostName 203.0.113.7\n"
        "    Port 2222\n"
        "    User student\n"
        "    ProxyCommand none\n"
        '    IdentityFile "/keys/a key"\n'
        "    IdentitiesOnly yes\n"
        "    HostKeyAlias i-1\n"
        '    UserKnownHostsFile "/state/i-1/known_hosts"\n'
        "    GlobalKnownHostsFile /dev/null\n"
        "    StrictHostKeyChecking yes\n"
        "    UpdateHostKeys no\n"
        "    CheckHostIP no\n"
        "    VerifyHostKeyDNS no\n"
        "    ForwardAgent no\n"
        "    ForwardX11 no\n"
        "    Ciphers ^aes128-gcm@openssh.com\n"
        "    ConnectTimeout 8\n"
        "    ServerAliveInterval 15\n"
        "    ServerAliveCountMax 4\n"
        'Match originalhost digits exec "test -O /tmp/labctl-501 || mkdir -m 700 /tmp/labctl-501"\n'
        "    ControlMaster auto\n"
        "    ControlPath /tmp/labctl-501/p-%C\n"
        "    ControlPersist 600\n"
    )


def test_ssh_reads_what_was_meant(tmp_path: Path) -> None:
    text = config(known_hosts="/a b/100%/known_hosts", runtime_dir=str(tmp_path))
    people = as_ssh_reads(text, "digits", tmp_path)
    assert people["hostname"] == "203.0.113.7"
    assert people["port"] == "2222"
    assert people["user"] == "student"
    assert people["identityfile"] == "/keys/a key"
    assert people["stricthostkeychecking"] == "true"
    assert people["forwardagent"] == "no"
    assert people["ciphers"].startswith("aes128-gcm@openssh.com,")
    assert people["controlmaster"] == "auto"
    assert people["serveraliveinterval"] == "15"
    assert people["serveralivecountmax"] == "4"
    own = as_ssh_reads(text, "I-1", tmp_path)
    assert own["hostkeyalias"] == "i-1"
    assert "controlpath" not in own, "labctl's own name must not touch people's master"


def test_a_directory_of_somebody_else_is_not_used_for_sockets(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.write_text("in the way, as a directory of another user would be")
    blocked = folder / "below"
    assert "controlpath" not in as_ssh_reads(config(runtime_dir=str(blocked)), "digits", tmp_path)


def test_the_users_own_proxy_for_all_hosts_does_not_reach_in(tmp_path: Path) -> None:
    text = config() + "Host *\n ProxyJump bastion\n ProxyCommand nc %h %p\n ForwardAgent yes\n"
    read = as_ssh_reads(text, "I-1", tmp_path)
    assert read.get("proxycommand", "none") == "none"
    assert "proxyjump" not in read
    assert read["forwardagent"] == "no"


def test_without_an_identity_the_users_keys_and_agent_count() -> None:
    text = config(msgspec.structs.replace(ENDPOINT, identity=""))
    assert "Identit" not in text


def test_jump_hosts_are_looked_up_in_the_users_config() -> None:
    command = ssh.jump_command("alice@outer:2200,[2001:db8::1]:22", user_config="/home/a b/config")
    assert shlex.split(command) == [
        *("ssh", "-F", "/home/a b/config", "-o", "StrictHostKeyChecking=yes"),
        *("-o", "ConnectTimeout=8", "-J", "alice@outer:2200", "-p", "22"),
        *("-W", "[%h]:%p", "--", "2001:db8::1"),
    ]
    assert f"ProxyCommand {ssh.jump_command('b')}\n" in config(
        msgspec.structs.replace(ENDPOINT, jump="b")
    )


def test_a_proxy_command_stands_as_it_is() -> None:
    endpoint = msgspec.structs.replace(ENDPOINT, proxy_command="nc -X 5 %h %p")
    assert "    ProxyCommand nc -X 5 %h %p\n" in config(endpoint)


@pytest.mark.parametrize(
    "change",
    [
        {"host": "-oProxyCommand=touch x"},
        {"host": "a b"},
        {"host": "a\nProxyCommand x"},
        {"host": ""},
        {"host": "\x1b[2J"},
        {"host": "$(id)"},
        {"host": "fe80::1%eth0;id"},
        {"user": "-lroot"},
        {"user": "a b"},
        {"user": "a\n"},
        {"user": ""},
        {"user": "`id`"},
        {"port": 0},
        {"port": 65536},
        {"jump": "-oProxyCommand=x"},
        {"jump": "a@-b"},
        {"jump": "a b"},
        {"jump": "b:99999"},
        {"jump": "a,,b"},
        {"identity": 'a"\nProxyCommand x'},
        {"identity": "${HOME}/key"},
        {"proxy_command": "nc\nLocalCommand x"},
    ],
)
def test_hostile_names_are_refused(change: dict[str, str | int]) -> None:
    with pytest.raises(UsageError) as caught:
        config(msgspec.structs.replace(ENDPOINT, **change))
    assert "\x1b" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "-x", "a/b", "..", ".hidden", "a b", "a*", "a\n", "é"])
def test_hostile_server_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        ssh.check_id(name)


@pytest.mark.parametrize("host", ["gpu1.lab.example", "10.0.0.1", "2001:db8::1", "fe80::1%eth0"])
def test_ordinary_hosts_pass(host: str, tmp_path: Path) -> None:
    read = as_ssh_reads(config(msgspec.structs.replace(ENDPOINT, host=host)), "I-1", tmp_path)
    assert read["hostname"] == host


@given(st.text(max_size=30))
def test_what_passes_is_one_harmless_word(text: str) -> None:
    for check in (ssh.check_host, ssh.check_user, ssh.check_id):
        try:
            check(text)
        except UsageError:
            continue
        assert text.isascii()
        assert not text.startswith("-")
        assert not set(text) & set(" \t\r\n\"'`$;&|<>()\\*?!#,/")


def test_known_hosts_lines(tmp_path: Path) -> None:
    line = ssh.known_hosts_line(ssh.host_key_alias("I-1"), KEY + " root@somewhere")
    assert line == f"i-1 {KEY}\n"
    (tmp_path / "known").write_text(line)
    found = subprocess.run(
        ["ssh-keygen", "-F", "i-1", "-f", str(tmp_path / "known")], capture_output=True, check=True
    )
    assert KEY.encode() in found.stdout
    assert ssh.known_hosts_name("h", 22) == "h"
    assert ssh.known_hosts_name("h", 2222) == "[h]:2222"
    for bad in ("", "ssh-ed25519", "ssh-ed25519 AA\nother * key", "@cert-authority * ssh-rsa AA"):
        with pytest.raises(UsageError):
            ssh.known_hosts_line("i-1", bad)


def test_own_commands_are_impatient_and_ask_nothing() -> None:
    argv = ssh.command_argv("/c", "i-1", "ls -l", control_path="/tmp/labctl-501/own-1")
    assert argv[:3] == ["ssh", "-F", "/c"]
    assert argv[-4:] == ["-T", "--", "i-1", "ls -l"]
    options = {argv[at + 1] for at, word in enumerate(argv) if word == "-o"}
    assert {
        "BatchMode=yes",
        "ConnectTimeout=8",
        "ServerAliveInterval=2",
        "ServerAliveCountMax=3",
        "ControlMaster=no",
        "ControlPath=/tmp/labctl-501/own-1",
    } <= options
    assert "ControlPath=none" in ssh.command_argv("/c", "i-1", "true")


def test_a_master_goes_to_the_background_after_the_login() -> None:
    argv = ssh.master_argv("/c", "i-1", "/tmp/s")
    assert argv[-3:] == ["-fNT", "--", "i-1"]
    assert "ControlPersist=600" in argv
    assert ssh.build_control_argv("/c", "i-1", "exit", "/tmp/s")[-4:] == ["-O", "exit", "--", "i-1"]


def test_a_forward_is_a_connection_of_its_own_on_loopback() -> None:
    argv = ssh.forward_argv("/c", "i-1", [(6006, 6006), (8888, 8889)])
    joined = " ".join(argv)
    assert "-L 127.0.0.1:6006:127.0.0.1:6006 -L 127.0.0.1:8888:127.0.0.1:8889 -- i-1" in joined
    for option in ("ControlMaster=no", "ControlPath=none", "ExitOnForwardFailure=yes"):
        assert f"-o {option}" in joined
    assert "-o ServerAliveInterval=2 -o ServerAliveCountMax=3" in joined
    with pytest.raises(UsageError):
        ssh.forward_argv("/c", "i-1", [(0, 1)])


def test_a_forward_to_a_machine_behind_the_server_logs_in_there_with_its_own_key() -> None:
    node = ssh.NodeLogin(
        command="srun sshd -f '50% off'", alias="i-1-node", known_hosts="/k", identity="/i"
    )
    argv = ssh.forward_argv("/c", "i-1", [(6006, 6007)], node)
    options = [word for before, word in itertools.pairwise(argv) if before == "-o"]
    proxy = next(option for option in options if option.startswith("ProxyCommand="))
    assert proxy.endswith(""" -T -- i-1 'srun sshd -f '"'"'50%% off'"'"''""")
    assert {"HostKeyAlias=i-1-node", 'UserKnownHostsFile="/k"', 'IdentityFile="/i"'} <= set(options)
    assert argv[-4:] == ["-L", "127.0.0.1:6006:127.0.0.1:6007", "--", "i-1"]


def test_a_socket_forward_is_private_and_replaces_an_old_socket() -> None:
    argv = ssh.socket_forward_argv("/c", "i-1", "/tmp/labctl-0/service-1", 8888)
    assert argv[-4:] == ["-L", "/tmp/labctl-0/service-1:127.0.0.1:8888", "--", "i-1"]
    assert {"StreamLocalBindMask=0177", "StreamLocalBindUnlink=yes"} <= set(argv)
    argv = ssh.socket_forward_argv("/c", "i-1", "/tmp/s", "/run/labctl/x.sock")
    assert argv[-3] == "/tmp/s:/run/labctl/x.sock"
    for path, remote in (("/tmp/%h", 1), ("/tmp/s:x", 1), ("/tmp/s", "/a b"), ("/tmp/s", 0)):
        with pytest.raises(UsageError):
            ssh.socket_forward_argv("/c", "i-1", path, remote)


def test_a_persons_ssh() -> None:
    argv = ssh.interactive_argv("/c", "i-1", runtime_dir="/tmp/r", login=("A=b",))
    assert argv[:5] == ["ssh", "-F", "/c", "-o", "A=b"]
    assert argv[-3:] == ["-t", "--", "i-1"]
    argv = ssh.interactive_argv("/c", "i-1", "htop", runtime_dir="/tmp/r", tty=False)
    assert argv[-3:] == ["--", "i-1", "htop"]
    assert "LogLevel=ERROR" in argv
    assert "-t" not in argv


def test_labctl_ssh_shares_the_master_of_the_alias_without_the_check_in_a_shell(
    tmp_path: Path,
) -> None:
    path, folder = tmp_path / "config", "/tmp/labctl-501"
    path.write_text(config().replace("test -O", f"touch {tmp_path}/called; true"))

    def read_options(*argv: str) -> set[str]:
        words = [argv[0], "-G", *argv[1:]]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        kinds = ("control", "hostname", "port", "user ")
        return {line for line in done.stdout.splitlines() if line.startswith(kinds)}

    own = read_options(*ssh.interactive_argv(str(path), "I-1", runtime_dir=folder))
    assert not (tmp_path / "called").exists()
    assert any(line.startswith(f"controlpath {folder}/p-") for line in own)
    assert own == read_options("ssh", "-F", str(path), "digits")
    assert (tmp_path / "called").exists()


def test_a_persons_ssh_to_a_silent_server_gives_up_as_soon_as_labctls_own(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(config())
    for argv in (
        ["ssh", "-F", str(path), "digits"],
        ssh.interactive_argv(str(path), "I-1", runtime_dir="/tmp/labctl-501"),
    ):
        words = [argv[0], "-G", *argv[1:]]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        assert f"connecttimeout {ssh.CONNECT_TIMEOUT_S}" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("version", "asked_for"),
    [
        ("OpenSSH_8.9p1 Ubuntu-3ubuntu0.10, OpenSSL 3.0.2", ()),
        ("OpenSSH_9.2p1 Debian-2+deb12u10, OpenSSL 3.0.19", ("KexAlgorithms=^curve25519-sha256",)),
        ("OpenSSH_for_Windows_9.5p1, LibreSSL 3.8.2", ("KexAlgorithms=^curve25519-sha256",)),
        ("OpenSSH_9.9p2, LibreSSL 3.3.6", ("KexAlgorithms=^mlkem768x25519-sha256",)),
        ("OpenSSH_10.0p2 Debian-7, OpenSSL 3.5.1", ()),
        ("Dropbear v2024.85", ()),
        ("", ()),
    ],
)
def test_only_a_client_that_begins_slowly_is_asked_for_another_key_exchange(
    version: str, asked_for: tuple[str, ...]
) -> None:
    assert ssh.choose_fast_kex_options(version) == asked_for
    for argv in (
        ssh.master_argv("/c", "i-1", "/tmp/s", asked_for),
        ssh.interactive_argv("/c", "i-1", runtime_dir="/tmp/r", login=asked_for),
    ):
        assert [word for word in argv if "Kex" in word] == list(asked_for)


def test_this_machines_ssh_knows_what_it_is_asked_for() -> None:
    options = [word for option in find_quick_login_options() for word in ("-o", option)]
    argv = ["ssh", "-F", "none", *options, "-G", "host"]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, capture_output=True)


def test_host_names_of_a_users_config() -> None:
    hosts, includes = ssh.parse_host_patterns(
        '# Host commented\nHost a b *.example !c\n  User x\nHOST=d\nhost "e f"\n'
        'Include conf.d/* "~/my hosts"\nMatch host z\n'
    )
    assert hosts == ["a", "b", "d", "e f"]
    assert includes == ["conf.d/*", "~/my hosts"]
