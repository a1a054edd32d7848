"""What labctl says to OpenSSH: one ssh_config per server, known_hosts lines, argv. No I/O.

A server has two names in its config. People (and VS Code, scp, Ansible) use its alias: patient
keep-alive, a shared master of their own. labctl uses the server's id: `OWN_OPTIONS` notice a dead
link within 6 s, and the master lies at another path. Forwards share no master at all.
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


class Hop(Value, frozen=True):
    """One machine on the way to a server. `user` "" and `port` 0 leave it to the user's config."""

    host: str
    user: str = ""
    port: int = 0


def check_user(user: str) -> str:
    """`user`, or UsageError where it could be read as anything but a login name."""
    if not re.match(_USER, user):
        raise _bad("user name", user)
    return user


def check_host(host: str) -> str:
    """`host` (a name or an address without brackets), or UsageError."""
    if not (re.match(_HOST, host) or (":" in host and re.match(_ADDRESS6, host))):
        raise _bad("host name", host)
    return host


def check_port(port: int) -> int:
    if not 0 < port < 65536:
        raise UsageError(
            f"{port} is not a port",
            why="ports go from 1 to 65535",
            hint="labctl config   # where the port stands",
        )
    return port


def check_id(name: str) -> str:
    """A server id or alias: safe as a file name, a Host pattern and a word of argv."""
    if not re.match(_ID, name):
        raise _bad("server name", name)
    return name


def _bad(kind: str, text: str) -> UsageError:
    return UsageError(
        f"{text!a} is not a {kind}",
        why="letters, digits, '.', '_' and '-' are allowed, and it may not start with '-'",
        hint="labctl config",
    )


def parse_hops(jump: str) -> tuple[Hop, ...]:
    """The hops of "alice@bastion:2222,inner", nearest first; UsageError for anything else."""
    hops = []
    for text in jump.split(",") if jump else ():
        match = re.match(_HOP, text.strip())
        if match is None:
            raise _bad("jump host", text)
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
    """The ProxyCommand that goes through `jump`.

    Not ProxyJump: that would look the hops up in the server's own config file, while they are
    names of the user's. Keys of hops must be known to the user's ssh already.
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
    """The text of one server's ssh_config.

    `known_hosts` is the absolute path of the server's own file. `runtime_dir` is a short
    directory for control sockets; people's ssh makes it anew where a reboot has emptied /tmp, and
    shares no master where it belongs to somebody else. `user_config` is where hops are described.
    """
    check_id(alias)
    if not re.match(_RUNTIME_DIR, runtime_dir):
        raise _bad("directory for control sockets", runtime_dir)
    names = dict.fromkeys((alias, check_id(server_id)))
    body = [
        *_address(endpoint, user_config),
        *_identity(endpoint),
        f"HostKeyAlias {host_key_alias(server_id)}",
        f"UserKnownHostsFile {_path(known_hosts)}",
        "GlobalKnownHostsFile /dev/null",
        "StrictHostKeyChecking yes",
        "UpdateHostKeys no",
        "CheckHostIP no",
        "VerifyHostKeyDNS no",
        "ForwardAgent no",
        "ForwardX11 no",
        "Ciphers ^aes128-gcm@openssh.com",
        "ServerAliveInterval 15",
        "ServerAliveCountMax 4",
    ]
    master = [
        "ControlMaster auto",
        f"ControlPath {runtime_dir}/p-%C",
        f"ControlPersist {MASTER_PERSIST_S}",
    ]
    make_dir = f"test -O {runtime_dir} || mkdir -m 700 {runtime_dir}"
    return "\n".join(
        [
            f"# Server {server_id}. Written by labctl, which replaces it; edit your own config.",
            f"Host {' '.join(names)}",
            *(f"    {line}" for line in body),
            f'Match originalhost {alias} exec "{make_dir}"',
            *(f"    {line}" for line in master),
            "",
        ]
    )


def _address(endpoint: Endpoint, user_config: str) -> list[str]:
    proxy = endpoint.proxy_command
    if endpoint.jump:
        proxy = jump_command(endpoint.jump, user_config=user_config)
    if "\n" in proxy or "\r" in proxy or "\0" in proxy:
        raise UsageError(
            "a proxy command must be one line",
            why=f"it is {proxy!a}",
            hint="labctl config   # or ssh -G HOST, for an alias of ~/.ssh/config",
        )
    return [
        f"HostName {check_host(endpoint.host).replace('%', '%%')}",
        f"Port {check_port(endpoint.port)}",
        f"User {check_user(endpoint.user)}",
        # The user's own `Host *` may name a proxy; what is said first wins.
        f"ProxyCommand {proxy}" if proxy else "ProxyCommand none",
    ]


def _identity(endpoint: Endpoint) -> list[str]:
    if not endpoint.identity:
        return []
    return [f"IdentityFile {_path(endpoint.identity)}", "IdentitiesOnly yes"]


def _path(path: str) -> str:
    if any(character in path for character in '"\n\r\0') or "${" in path:
        raise UsageError(
            f"{path!a} cannot stand in an ssh_config",
            why="it holds a quote or ${",
            hint="labctl config   # a path without quotes",
        )
    return '"' + path.replace("%", "%%") + '"'


def include_line(folder: str, files: str) -> str:
    """`Include` for `files` (perhaps a pattern) in this absolute directory.

    What Include would read as a pattern or token in the directory's name becomes `?`, which
    matches it.
    """
    safe = re.sub(r"[*?\[\]\\%$]", "?", folder)
    return f"Include {_path(f'{safe}/{files}')}"


def host_key_alias(server_id: str) -> str:
    """The name a server's key is pinned under. Lower case: ssh lowers known_hosts patterns."""
    return check_id(server_id).lower()


def known_hosts_line(name: str, host_key: str) -> str:
    """One line of known_hosts, newline included. `host_key` is "type base64[ comment]"."""
    key = " ".join(host_key.split()[:2])
    if not re.match(_HOST_KEY, key) or len(host_key.splitlines()) > 1:
        raise UsageError(f"{host_key[:40]!a} is not a public key")
    return f"{name} {key}\n"


def known_hosts_name(host: str, port: int) -> str:
    """How a user's known_hosts calls this host."""
    return check_host(host) if port == 22 else f"[{check_host(host)}]:{check_port(port)}"


def parse_host_patterns(text: str) -> tuple[list[str], list[str]]:
    """What a user's ssh_config declares: its exact Host names, and what it includes, in order."""
    hosts: list[str] = []
    includes: list[str] = []
    for line in text.splitlines():
        if not line.lstrip().lower().startswith(("host", "include")):
            continue
        words = _config_words(line)
        if not words:
            continue
        if words[0].lower() == "host":
            hosts += [w for w in words[1:] if not any(c in w for c in "*?!")]
        elif words[0].lower() == "include":
            includes += words[1:]
    return hosts, includes


def _config_words(line: str) -> list[str]:
    keyword, _, rest = re.sub(r"^(\s*\w+)\s*=", r"\1 ", line).strip().partition(" ")
    if not keyword or keyword.startswith("#"):
        return []
    return [keyword, *(a or b for a, b in re.findall(r'"([^"]*)"|(\S+)', rest))]


def quick_login(version: str) -> tuple[str, ...]:
    """Options that make logins of a client that calls itself `version` (`ssh -V`) quicker.

    OpenSSH 9.0 to 9.9 begin with sntrup761x25519, which takes 67 ms of processor for each login;
    9.9 knows mlkem768x25519, which resists quantum computers too and takes 2 ms. Before it only
    curve25519 is as quick. Older and newer clients begin with these anyway.
    """
    found = re.match(_VERSION, version)
    release = (int(found[1]), int(found[2])) if found else (0, 0)
    if not (9, 0) <= release <= (9, 9):
        return ()
    name = "mlkem768x25519-sha256" if release == (9, 9) else "curve25519-sha256"
    return (f"KexAlgorithms=^{name}",)


def _own(config: str, control_path: str, login: Iterable[str] = ()) -> list[str]:
    options = [*OWN_OPTIONS, *login, "ControlMaster=no", f"ControlPath={control_path or 'none'}"]
    return ["ssh", "-F", config, *_options(options)]


def _options(options: Iterable[str]) -> list[str]:
    return [word for option in options for word in ("-o", option)]


def command_argv(config: str, server_id: str, line: str, *, control_path: str = "") -> list[str]:
    """labctl's own command on a server, never with a tty; over its master where there is one."""
    return [*_own(config, control_path), "-T", "--", check_id(server_id), line]


def shell_words(config: str, *, control_path: str = "") -> list[str]:
    """What another program puts before the server's id and a line; rsync's `-e`."""
    return [*_own(config, control_path), "-T"]


def master_argv(
    config: str, server_id: str, control_path: str, login: Iterable[str] = ()
) -> list[str]:
    """Log in, leave labctl's master in the background, and exit 0; it ends after idle minutes.

    `login` are options as of `quick_login`.
    """
    options = [*OWN_OPTIONS, *login, "ControlMaster=yes", f"ControlPath={control_path}"]
    options += [f"ControlPersist={MASTER_PERSIST_S}"]
    return ["ssh", "-F", config, *_options(options), "-fNT", "--", check_id(server_id)]


def control_argv(config: str, server_id: str, action: str, control_path: str) -> list[str]:
    """`ssh -O action` ("check", "exit", "stop") to labctl's master."""
    argv = ["ssh", "-F", config, *_options([f"ControlPath={control_path}", "LogLevel=ERROR"])]
    return [*argv, "-O", action, "--", check_id(server_id)]


def forward_argv(config: str, server_id: str, ports: Iterable[tuple[int, int | str]]) -> list[str]:
    """Hold local ports (loopback only) open to what the server has, until it ends.

    `ports` are (local, remote): a port of the server's loopback, or a Unix socket's path. A
    connection of its own, so that neither a closing master nor bulk data takes it along; it ends
    when a port is taken or, within 6 s, when the link is dead.
    """
    argv = [*_own(config, ""), "-o", "ExitOnForwardFailure=yes", "-NT"]
    for local, remote in ports:
        far = f"127.0.0.1:{check_port(remote)}" if isinstance(remote, int) else _socket(remote)
        argv += ["-L", f"127.0.0.1:{check_port(local)}:{far}"]
    return [*argv, "--", check_id(server_id)]


def _socket(path: str) -> str:
    """The server named it, so it is looked at: ssh would expand some signs."""
    if not re.match(_SOCKET, path):
        raise UsageError(f"{path!r} is no place of a service", why="the server named it")
    return path


def interactive_argv(
    config: str, alias: str, line: str = "", *, tty: bool = True, login: Iterable[str] = ()
) -> list[str]:
    """A person's ssh to the server: a shell, or one line with a tty."""
    argv = ["ssh", "-F", config, *_options(login), *(["-t"] if tty else [])]
    argv += ["--", check_id(alias)]
    return [*argv, line] if line else argv
