"""The input of OpenSSH: one ssh_config per server, known_hosts lines, argv. No I/O.

A server has two names in its config. Users (and VS Code, scp, Ansible) use its alias: slow
keep-alive, and a shared master for these sessions. labctl uses the server's id: `OWN_OPTIONS`
notice a dead link within 6 s, and the master's socket has another path. Forwards use no master.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from labctl.errors import UsageError
from labctl.model import Endpoint, Value

CONNECT_TIMEOUT_S = 8
MASTER_PERSIST_S = 600

_USER = r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,63}\Z"
_HOST = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}\Z"
_ADDRESS6 = r"[0-9A-Fa-f:][0-9A-Fa-f:.]*(%[A-Za-z0-9._-]+)?\Z"
_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z"
_HOST_KEY = r"[a-z0-9@.-]+ [A-Za-z0-9+/]+=*\Z"
_RUNTIME_DIR = r"[A-Za-z0-9/._-]+\Z"
_SOCKET = r"/[A-Za-z0-9_./-]{1,106}\Z"
_HOP = r"(?:([^@]+)@)?(\[[^\]]+\]|[^:\[\]]+)(?::([0-9]+))?\Z"

OWN_OPTIONS = (
    "BatchMode=yes",
    f"ConnectTimeout={CONNECT_TIMEOUT_S}",
    "ServerAliveInterval=2",
    "ServerAliveCountMax=3",
    "LogLevel=ERROR",
)


_VERSION = r"OpenSSH_(?:for_Windows_)?(\d+)\.(\d+)"


class NodeLogin(Value, frozen=True):
    """The login to a machine behind a server: `command`, on the server, speaks SSH with it.

    `known_hosts` has its key under the name `alias`; `identity` is the private key.
    """

    command: str
    alias: str
    known_hosts: str
    identity: str


class Hop(Value, frozen=True):
    """A jump host. With `user` "" or `port` 0 the user's ssh_config decides."""

    host: str
    user: str = ""
    port: int = 0


def check_user(user: str) -> str:
    """Return `user`; UsageError if it could be read as anything but a login name."""
    if not re.match(_USER, user):
        raise _make_name_error("user name", user)
    return user


def check_host(host: str) -> str:
    """Return `host`; UsageError unless it is a name or an address without brackets."""
    if not (re.match(_HOST, host) or (":" in host and re.match(_ADDRESS6, host))):
        raise _make_name_error("host name", host)
    return host


def check_port(port: int) -> int:
    if not 0 < port < 65536:
        raise UsageError(
            f"{port} is not a port",
            why="ports go from 1 to 65535",
            hint="labctl config   # shows where the port is set",
        )
    return port


def check_id(name: str) -> str:
    """Return a server id or alias that is safe as a file name, a Host pattern and in argv."""
    if not re.match(_ID, name):
        raise _make_name_error("server name", name)
    return name


def _make_name_error(kind: str, text: str) -> UsageError:
    return UsageError(
        f"{text!a} is not a {kind}",
        why="letters, digits, '.', '_' and '-' are allowed, and it may not start with '-'",
        hint="labctl config",
    )


def parse_hops(jump: str) -> tuple[Hop, ...]:
    """Parse hops like "alice@bastion:2222,inner", nearest first; UsageError for anything else."""
    hops = []
    for text in jump.split(",") if jump else ():
        match = re.match(_HOP, text.strip())
        if match is None:
            raise _make_name_error("jump host", text)
        user, host, port = match.groups()
        hops.append(
            Hop(
                host=check_host(host.strip("[]")),
                user=check_user(user) if user else "",
                port=check_port(int(port)) if port else 0,
            )
        )
    return tuple(hops)


def jump_command(jump: str, *, user_config: str = "") -> str:
    """Build the ProxyCommand that goes through `jump`.

    Not ProxyJump, which would look the hops up in the server's own config file, while the user's
    config defines them. The user's ssh must already know the host keys of the hops.
    """
    *earlier, last = parse_hops(jump)
    words = ["ssh", *(("-F", user_config) if user_config else ())]
    words += ["-o", "StrictHostKeyChecking=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}"]
    if earlier:
        words += ["-J", ",".join(_hop_text(hop) for hop in earlier)]
    words += ["-p", str(last.port)] if last.port else []
    words += ["-l", last.user] if last.user else []
    quoted = shlex.join(words).replace("%", "%%")
    return f"{quoted} -W '[%h]:%p' -- {shlex.quote(last.host)}"


def _hop_text(hop: Hop) -> str:
    host = f"[{hop.host}]" if ":" in hop.host else hop.host
    return (f"{hop.user}@" if hop.user else "") + host + (f":{hop.port}" if hop.port else "")


def server_config(
    server_id: str,
    alias: str,
    endpoint: Endpoint,
    *,
    known_hosts: str,
    runtime_dir: str,
    user_config: str = "",
) -> str:
    """Build the text of one server's ssh_config.

    `known_hosts` is the absolute path of the server's own file. `runtime_dir` is a short directory
    for control sockets; the user's ssh creates it again after a reboot has emptied /tmp, and shares
    no master if it belongs to another user. `user_config` is the file that defines the hops.
    """
    check_id(alias)
    if not re.match(_RUNTIME_DIR, runtime_dir):
        raise _make_name_error("directory for control sockets", runtime_dir)
    names = dict.fromkeys((alias, check_id(server_id)))
    body = [
        *_address_lines(endpoint, user_config),
        *_identity_lines(endpoint),
        f"HostKeyAlias {host_key_alias(server_id)}",
        f"UserKnownHostsFile {_quote_path(known_hosts)}",
        "GlobalKnownHostsFile /dev/null",
        "StrictHostKeyChecking yes",
        "UpdateHostKeys no",
        "CheckHostIP no",
        "VerifyHostKeyDNS no",
        "ForwardAgent no",
        "ForwardX11 no",
        "Ciphers ^aes128-gcm@openssh.com",
        f"ConnectTimeout {CONNECT_TIMEOUT_S}",
        "ServerAliveInterval 15",
        "ServerAliveCountMax 4",
    ]
    master = [option.replace("=", " ", 1) for option in _list_user_master_options(runtime_dir)]
    make_dir = f"test -O {runtime_dir} || mkdir -m 700 {runtime_dir}"
    return "\n".join(
        [
            f"# Server {server_id}.",
            "# Written by labctl, which replaces it. Put your changes into your own config.",
            f"Host {' '.join(names)}",
            *(f"    {line}" for line in body),
            f'Match originalhost {alias} exec "{make_dir}"',
            *(f"    {line}" for line in master),
            "",
        ]
    )


def _list_user_master_options(runtime_dir: str) -> tuple[str, ...]:
    """Return the options of the master that the user's sessions share."""
    return (
        "ControlMaster=auto",
        f"ControlPath={runtime_dir}/p-%C",
        f"ControlPersist={MASTER_PERSIST_S}",
    )


def _address_lines(endpoint: Endpoint, user_config: str) -> list[str]:
    proxy = endpoint.proxy_command
    if endpoint.jump:
        proxy = jump_command(endpoint.jump, user_config=user_config)
    if "\n" in proxy or "\r" in proxy or "\0" in proxy:
        raise UsageError(
            "a proxy command must be one line",
            why=f"it is {proxy!a}",
            hint="labctl config\nssh -G HOST   # for an alias of ~/.ssh/config",
        )
    return [
        f"HostName {check_host(endpoint.host).replace('%', '%%')}",
        f"Port {check_port(endpoint.port)}",
        f"User {check_user(endpoint.user)}",
        # The user's own `Host *` may set a proxy; ssh uses the first value.
        f"ProxyCommand {proxy}" if proxy else "ProxyCommand none",
    ]


def _identity_lines(endpoint: Endpoint) -> list[str]:
    if not endpoint.identity:
        return []
    return [f"IdentityFile {_quote_path(endpoint.identity)}", "IdentitiesOnly yes"]


def _quote_path(path: str) -> str:
    if any(character in path for character in '"\n\r\0') or "${" in path:
        raise UsageError(
            f"{path!a} cannot be written into an ssh_config",
            why="it contains a quote or ${",
            hint="labctl config   # set a path without quotes",
        )
    return '"' + path.replace("%", "%%") + '"'


def include_line(folder: str, files: str) -> str:
    """Build an `Include` for `files` (perhaps a pattern) in this absolute directory.

    Characters of the directory's name that Include would read as a pattern or token become `?`,
    which matches them.
    """
    safe = re.sub(r"[*?\[\]\\%$]", "?", folder)
    return f"Include {_quote_path(f'{safe}/{files}')}"


def host_key_alias(server_id: str) -> str:
    """Return the name in known_hosts of a server's pinned key, lowercase since ssh lowers it."""
    return check_id(server_id).lower()


def known_hosts_line(name: str, host_key: str) -> str:
    """Build a line of known_hosts, newline included. `host_key` is "type base64[ comment]"."""
    key = " ".join(host_key.split()[:2])
    if not re.match(_HOST_KEY, key) or len(host_key.splitlines()) > 1:
        raise UsageError(f"{host_key[:40]!a} is not a public key")
    return f"{name} {key}\n"


def known_hosts_name(host: str, port: int) -> str:
    """Return the name of this host in a user's known_hosts."""
    return check_host(host) if port == 22 else f"[{check_host(host)}]:{check_port(port)}"


def parse_host_patterns(text: str) -> tuple[list[str], list[str]]:
    """Parse a user's ssh_config: (its exact Host names, its includes in order)."""
    hosts: list[str] = []
    includes: list[str] = []
    for line in text.splitlines():
        if not line.lstrip().lower().startswith(("host", "include")):
            continue
        words = _split_config_line(line)
        if not words:
            continue
        if words[0].lower() == "host":
            hosts += [w for w in words[1:] if not any(c in w for c in "*?!")]
        elif words[0].lower() == "include":
            includes += words[1:]
    return hosts, includes


def _split_config_line(line: str) -> list[str]:
    keyword, _, rest = re.sub(r"^(\s*\w+)\s*=", r"\1 ", line).strip().partition(" ")
    if not keyword or keyword.startswith("#"):
        return []
    return [keyword, *(a or b for a, b in re.findall(r'"([^"]*)"|(\S+)', rest))]


def choose_fast_kex_options(version: str) -> tuple[str, ...]:
    """Return options that make logins faster with the client of this `version` (`ssh -V`).

    OpenSSH 9.0 to 9.9 prefer sntrup761x25519, which takes 67 ms of CPU time for each login. 9.9
    supports mlkem768x25519, which resists quantum computers too and takes 2 ms; in versions before
    it only curve25519 is as fast. Older and newer clients prefer these anyway.
    """
    match = re.match(_VERSION, version)
    release = (int(match[1]), int(match[2])) if match else (0, 0)
    if not (9, 0) <= release <= (9, 9):
        return ()
    name = "mlkem768x25519-sha256" if release == (9, 9) else "curve25519-sha256"
    return (f"KexAlgorithms=^{name}",)


def _base_argv(config: str, control_path: str) -> list[str]:
    options = [*OWN_OPTIONS, "ControlMaster=no", f"ControlPath={control_path or 'none'}"]
    return ["ssh", "-F", config, *_option_words(options)]


def _option_words(options: Iterable[str]) -> list[str]:
    return [word for option in options for word in ("-o", option)]


def command_argv(config: str, server_id: str, line: str, *, control_path: str = "") -> list[str]:
    """Build argv for labctl's own command on a server, without a tty, over its master if any."""
    return [*_base_argv(config, control_path), "-T", "--", check_id(server_id), line]


def terminal_argv(config: str, server_id: str, line: str) -> list[str]:
    """Build argv that runs a line on a terminal of the server, over a connection of its own."""
    return [*_base_argv(config, ""), "-tt", "--", check_id(server_id), line]


def shell_words(config: str, *, control_path: str = "") -> list[str]:
    """Build the words that another program puts before a server's id and a line: rsync's `-e`."""
    return [*_base_argv(config, control_path), "-T"]


def master_argv(
    config: str, server_id: str, control_path: str, login: Iterable[str] = ()
) -> list[str]:
    """Build argv that logs in, leaves labctl's master in the background, and exits with 0.

    The master ends after MASTER_PERSIST_S without use. `login` are the options of
    `quick_login_options`.
    """
    options = [*OWN_OPTIONS, *login, "ControlMaster=yes", f"ControlPath={control_path}"]
    options += [f"ControlPersist={MASTER_PERSIST_S}"]
    return ["ssh", "-F", config, *_option_words(options), "-fNT", "--", check_id(server_id)]


def build_control_argv(config: str, server_id: str, action: str, control_path: str) -> list[str]:
    """Build argv for `ssh -O action` ("check", "exit", "stop") to labctl's master."""
    argv = ["ssh", "-F", config, *_option_words([f"ControlPath={control_path}", "LogLevel=ERROR"])]
    return [*argv, "-O", action, "--", check_id(server_id)]


def forward_argv(
    config: str,
    server_id: str,
    ports: Iterable[tuple[int, int | str]],
    node: NodeLogin | None = None,
) -> list[str]:
    """Build argv that forwards local ports (loopback only) to the server, until it exits.

    `ports` are (local, remote): remote is a port of the server's loopback, or the path of a Unix
    socket. It uses a separate connection, so that neither a closing master nor bulk data affects
    it. It exits if a port is in use or, within 6 s, when the link is dead. Once it listens on all
    ports, it prints an empty line: LocalCommand runs after that. With `node` the ports are those of
    that machine.
    """
    argv = _forward_base_argv(config)
    argv += _option_words(_list_node_options(config, server_id, node)) if node else []
    for local, remote in ports:
        argv += ["-L", f"127.0.0.1:{check_port(local)}:{_format_target(remote)}"]
    return [*argv, "--", check_id(server_id)]


def _list_node_options(config: str, server_id: str, node: NodeLogin) -> list[str]:
    """Return the options that replace the server's own ones: ssh uses the first value."""
    proxy = shlex.join(command_argv(config, server_id, node.command)).replace("%", "%%")
    return [
        f"ProxyCommand={proxy}",
        f"HostKeyAlias={node.alias}",
        f"UserKnownHostsFile={_quote_path(node.known_hosts)}",
        f"IdentityFile={_quote_path(node.identity)}",
        "IdentitiesOnly=yes",
    ]


def socket_forward_argv(config: str, server_id: str, path: str, remote: int | str) -> list[str]:
    """Build argv that forwards a local Unix socket, which only this user can open.

    Otherwise like `forward_argv`. A socket that an earlier process left at `path` is replaced.
    """
    options = _option_words(("StreamLocalBindUnlink=yes", "StreamLocalBindMask=0177"))
    forward = f"{_check_socket(path)}:{_format_target(remote)}"
    return [*_forward_base_argv(config), *options, "-L", forward, "--", check_id(server_id)]


def _forward_base_argv(config: str) -> list[str]:
    said = ("ExitOnForwardFailure=yes", "PermitLocalCommand=yes", "LocalCommand=echo")
    return [*_base_argv(config, ""), *_option_words(said), "-NT"]


def _format_target(remote: int | str) -> str:
    if isinstance(remote, int):
        return f"127.0.0.1:{check_port(remote)}"
    return _check_socket(remote)


def _check_socket(path: str) -> str:
    """Return a socket's path; UsageError for characters that ssh expands: the server chose it."""
    if not re.match(_SOCKET, path):
        raise UsageError(f"{path!r} is not a valid socket path", why="the server sent this path")
    return path


def interactive_argv(
    config: str,
    server_id: str,
    line: str = "",
    *,
    runtime_dir: str,
    tty: bool = True,
    login: Iterable[str] = (),
) -> list[str]:
    """Build argv for the user's own ssh to the server: a shell, or one line with a tty.

    It shares the master of the alias. But for the alias ssh would first start the user's shell, to
    check `runtime_dir`, which takes 5 ms.
    """
    options = [*login, *_list_user_master_options(runtime_dir)]
    if line:  # ssh says that a shared connection is closed, which means nothing after a command
        options.append("LogLevel=ERROR")
    argv = ["ssh", "-F", config, *_option_words(options), *(["-t"] if tty else [])]
    argv += ["--", check_id(server_id)]
    return [*argv, line] if line else argv
