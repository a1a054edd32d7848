"""The probe of a server: a POSIX shell script, the parser of its output, and what a server lacks.

The script needs only `sh` and common small programs; the key of a missing program is absent from
the output. The output starts at a marker line, so that a banner of a start-up file before it does
no harm.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from msgspec.structs import replace

from labctl.commands.shell_output import parse_gpus, parse_int_or_zero
from labctl.errors import LabError
from labctl.model import DockerFault, ServerFacts, Value

BEGIN = "=== labctl probe ==="
END = "=== labctl probe end ==="

NOT_INSTALLED = "not installed"
NOT_ANSWERING = "the daemon does not answer"

OLDEST_PYTHON = (3, 8)

# The input of `sh -s`. It changes nothing on the server and always exits with code 0.
SCRIPT = (
    f"""\
echo {shlex.quote(BEGIN)}
end={shlex.quote(END)}
"""
    r"""
LC_ALL=C; export LC_ALL
PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/lib/wsl/lib
export PATH

say() { printf '%s=%s\n' "$1" "$(printf %s "$2" | tr '\n\r' '  ')"; }
has() { command -v "$1" >/dev/null 2>&1; }
# A dead NFS server or a broken driver hangs forever: this limits each command.
if timeout 1 true 2>/dev/null; then soon() { timeout 10 "$@" </dev/null; }
else soon() { "$@" </dev/null; }; fi

say os "$(. /etc/os-release 2>/dev/null && printf %s "$PRETTY_NAME")"
say arch "$(uname -m)"
say kernel "$(uname -r)"
say user "$(id -un)"
say uid "$(id -u)"
say gid "$(id -g)"
say home "$HOME"
say boot_id "$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)"
say uptime_s "$(cut -d ' ' -f 1 /proc/uptime 2>/dev/null)"
say cpus "$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null)"
say memory_kib "$(sed -n 's/^MemTotal: *\([0-9]*\).*/\1/p' /proc/meminfo 2>/dev/null)"
say memory_limit "$(cat /sys/fs/cgroup/memory.max 2>/dev/null ||
  cat /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null)"
say stamp "$(head -n 1 /var/lib/labctl/stamp 2>/dev/null)"

place=$HOME/labctl
[ -d "$place/." ] || place=$HOME
say disk_free_kib "$(soon df -Pk "$place" 2>/dev/null | awk 'NR == 2 { print $4 }')"
say home_filesystem "$(soon df -PT "$HOME" 2>/dev/null | awk 'NR == 2 { print $2 }')"
say home_filesystem_stat "$(soon stat -f -c %T "$HOME" 2>/dev/null)"

has python3 && say python "$(soon python3 -c \
  'import sys; print(".".join(map(str, sys.version_info[:3])))' 2>/dev/null)"
# Not imported, which takes half a second. A boto3 without that module is too old for checksums.
own=$HOME/.local/share/labctl/boto3/bin/python3
for program in /opt/labctl/venv/bin/python3 "$own" python3; do
  has "$program" && say boto3 "$(soon "$program" -c 'import os, sys
from importlib.util import find_spec
found = find_spec("boto3") and find_spec("botocore")
print(int(bool(found) and os.path.exists(os.path.join(
    os.path.dirname(found.origin), "httpchecksum.py"))))' 2>/dev/null)"
done
has tmux && say tmux "$(soon tmux -V 2>/dev/null)"
has rsync && say rsync "$(soon rsync --version 2>/dev/null)"
if [ "$(id -u)" = 0 ] || { has sudo && soon sudo -n true >/dev/null 2>&1; }; then say sudo 1; fi

engine() {
  said=$(soon docker version --format 'labctl-engine {{.Server.Version}}' 2>&1) && case $said in
    *'labctl-engine '[0-9]*) return 0 ;;
  esac
  return 1
}
if has docker; then
  # A daemon that is starting (the server just booted) gets ten seconds to answer.
  tries=0
  until engine; do
    tries=$((tries + 1))
    case $said in *'Cannot connect'*) ;; *) break ;; esac
    cat /proc/[0-9]*/comm 2>/dev/null | grep -qx dockerd || break
    [ "$tries" -lt 20 ] || break
    sleep 0.5 2>/dev/null || sleep 1
  done
  say docker_said "$said"
fi

if [ -w /run/labctl/broker.sock ] && has python3; then
  # A shared server's GPUs are leased: accounts cannot open their device nodes.
  soon python3 -I -S -c 'import json, socket
link = socket.socket(socket.AF_UNIX)
link.connect("/run/labctl/broker.sock")
link.sendall(b"GET /labctl/gpus HTTP/1.0\r\n\r\n")
said = b"".join(iter(lambda: link.recv(65536), b""))
for one in json.loads(said.partition(b"\r\n\r\n")[2])["gpus"]:
    mib = one.get("memory_total_bytes", 0) // 2**20
    print(one["uuid"], mib, one["driver"], one["name"], sep=", ")' 2>/dev/null
elif has nvidia-smi; then
  soon nvidia-smi --query-gpu=uuid,memory.total,driver_version,name \
    --format=csv,noheader,nounits 2>/dev/null
fi | while IFS= read -r gpu; do say gpu "$gpu"; done
for program in nvidia-container-runtime-hook nvidia-container-cli; do
  has "$program" && say nvidia_runtime "$program"
done
for spec in /etc/cdi/nvidia* /var/run/cdi/nvidia*; do
  [ -r "$spec" ] && say nvidia_runtime "$spec"
done
case $said in *'labctl-engine '[0-9]*)
  soon docker info --format '{{range $name, $runtime := .Runtimes}}{{$name}} {{end}}' 2>/dev/null |
    grep -qw nvidia && say nvidia_runtime docker ;;
esac
echo "$end"
"""
)


class MissingRequirement(Value, frozen=True):
    """Something that labctl needs and the server lacks.

    `words` tell the user what is wrong; `command` is the administrator's command that fixes it.
    A server without an `optional` thing (the NVIDIA runtime) is still usable.
    """

    name: str
    words: str
    command: str
    optional: bool = False


def parse(stdout: str, stderr: str = "") -> ServerFacts:
    """Parse the script's output into Facts; LabError if it is missing or incomplete."""
    lines = stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.endswith(BEGIN)), None)
    if start is None or END not in (line.strip() for line in lines[start:]):
        raise LabError(
            "the server did not run labctl's probe",
            why="it printed: " + (_shorten(stdout + " " + stderr) or "nothing"),
            hint=lambda subject: f"{subject.ssh('echo ok')}   # must print ok and nothing else",
        )
    values: dict[str, list[str]] = {}
    for line in lines[start + 1 :]:
        if line.strip() == END:
            break
        key, equals, value = line.partition("=")
        if equals:
            values.setdefault(key, []).append(value.strip())
    return _build_facts(values)


def _shorten(text: str) -> str:
    """Return the last 300 characters in one line, with everything unprintable as spaces."""
    printable = "".join(c if c.isprintable() else " " for c in text.strip()[-300:])
    return " ".join(printable.split())


def _build_facts(values: dict[str, list[str]]) -> ServerFacts:
    first = {key: texts[0] for key, texts in values.items()}
    text = first.get
    docker, docker_fault, docker_error = _parse_docker(first.get("docker_said"))
    return ServerFacts(
        os=text("os", ""),
        arch=text("arch", ""),
        kernel=text("kernel", ""),
        user=text("user", ""),
        uid=parse_int_or_zero(text("uid", "")),
        gid=parse_int_or_zero(text("gid", "")),
        home=text("home", ""),
        home_filesystem=_choose_filesystem(
            text("home_filesystem", ""), text("home_filesystem_stat", "")
        ),
        boot_id=text("boot_id", ""),
        uptime_s=_parse_decimal(text("uptime_s", "")),
        python=_parse_version(text("python", "")),
        tmux=_parse_tmux(text("tmux", "")),
        rsync=_parse_version(text("rsync", "")),
        docker=docker,
        docker_fault=docker_fault,
        docker_error=docker_error,
        sudo=text("sudo", "") == "1",
        gpus=parse_gpus(values.get("gpu", ())),
        nvidia_runtime=bool(text("nvidia_runtime", "")),
        disk_free_bytes=parse_int_or_zero(text("disk_free_kib", "")) * 1024,
        memory_bytes=_choose_memory(text("memory_kib", ""), text("memory_limit", "")),
        cpus=parse_int_or_zero(text("cpus", "")),
        stamp=text("stamp", ""),
        boto3="1" in values.get("boto3", ()),
    )


def _parse_decimal(text: str) -> float:
    return float(text) if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?", text) else 0.0


def _parse_version(text: str) -> str:
    match = re.search(r"[0-9]+\.[0-9]+[0-9A-Za-z.+~-]*", text)
    return match.group() if match else ""


def _parse_tmux(text: str) -> str:
    """Return "3.3a" for "tmux 3.3a"; development builds say "tmux next-3.6" or "tmux master"."""
    return text.removeprefix("tmux ").removeprefix("next-").strip()


def _choose_filesystem(by_df: str, by_stat: str) -> str:
    """Return the type by its name in /proc/mounts; `stat` uses other names."""
    if by_df and by_df != "-":
        return by_df
    return {"ext2/ext3": "ext4", "v9fs": "9p", "fuseblk": "fuseblk"}.get(by_stat, by_stat)


def _choose_memory(kib: str, limit: str) -> int:
    """Return the smaller of the machine's memory and the limit of its cgroup, in bytes."""
    total, bound = parse_int_or_zero(kib) * 1024, parse_int_or_zero(limit)
    return min(total, bound) if total and bound else total


def _parse_docker(output: str | None) -> tuple[str, DockerFault, str]:
    """Parse `docker version`: (server version, "", "") or ("", why it cannot be used, in words).

    The docker command exits with 1 for every fault, so only its text tells them apart.
    """
    if output is None:
        return "", "missing", NOT_INSTALLED
    if match := re.search(r"\blabctl-engine ([0-9]\S*)", output):
        return match.group(1), "", ""
    if "permission denied" in output.lower():
        return "", "denied", "permission denied"
    if "podman" in output.lower():
        return "", "missing", f"{NOT_INSTALLED} (the docker command there is Podman)"
    detail = _shorten(output.replace("labctl-engine", ""))
    return "", "silent", f"{NOT_ANSWERING}: {detail}" if detail else NOT_ANSWERING


def list_missing(
    facts: ServerFacts, *, boto3: bool = False, docker: bool = True, sessions: bool = True
) -> list[MissingRequirement]:
    """List what the server lacks, each with the exact command for its administrator.

    `boto3`: the server calls AWS itself. `docker`: runs are containers. Without `sessions`, tmux is
    optional.
    """
    return [
        *(_missing_docker(facts) if docker else ()),
        *_missing_programs(facts, sessions),
        *(_missing_runtime(facts) if docker else ()),
        *(_missing_boto3(facts) if boto3 else ()),
    ]


def _missing_docker(facts: ServerFacts) -> list[MissingRequirement]:
    if not facts.docker_fault:
        return []
    user = shlex.quote(facts.user or "USER")
    rights = MissingRequirement(
        name="docker rights",
        words=f"the account {facts.user} may not use Docker (it is not in the group docker)",
        command=f"sudo usermod --append --groups docker {user}",
    )
    membership = f"the account {facts.user} must be in the group docker"
    if facts.docker_fault == "denied":
        return [rights]
    if facts.docker_fault == "missing":
        engine = MissingRequirement(
            name="docker",
            words=f"Docker Engine is {facts.docker_error}",
            command=_install_command(facts, "docker.io"),
        )
        return [engine] if facts.uid == 0 else [engine, replace(rights, words=membership)]
    return [
        MissingRequirement(
            name="docker daemon",
            words=f"Docker Engine is installed, but {facts.docker_error}",
            command="sudo systemctl enable --now docker",
        )
    ]


def _missing_programs(facts: ServerFacts, sessions: bool) -> list[MissingRequirement]:
    lacking = [
        MissingRequirement(
            name=name,
            words=f"{name} is not installed",
            command=_install_command(facts, name),
            optional=name == "tmux" and not sessions,
        )
        for name, version in (
            ("tmux", facts.tmux),
            ("python3", facts.python),
        )
        if not version
    ]
    if facts.python and not _is_new_enough(facts.python):
        oldest = ".".join(map(str, OLDEST_PYTHON))
        lacking.append(
            MissingRequirement(
                name="python3",
                words=f"python3 is {facts.python}; labctl needs {oldest} or newer",
                command="upgrade the system: Debian 11, Ubuntu 20.04 or newer",
            )
        )
    return lacking


def list_slow_parts(facts: ServerFacts) -> list[MissingRequirement]:
    """List what the server may lack, at the price of slower transfers."""
    if facts.rsync:
        return []
    return [
        MissingRequirement(
            name="rsync",
            words="rsync is not installed: files are sent as one stream, which cannot be resumed",
            command=_install_command(facts, "rsync"),
            optional=True,
        )
    ]


def _missing_runtime(facts: ServerFacts) -> list[MissingRequirement]:
    if not facts.gpus or facts.nvidia_runtime:
        return []
    return [
        MissingRequirement(
            name="nvidia runtime",
            words="the server has a GPU, but containers cannot use it without the "
            "NVIDIA Container Toolkit",
            command="install nvidia-container-toolkit 1.17.8 or newer: https://docs.nvidia.com/"
            "datacenter/cloud-native/container-toolkit/latest/install-guide.html",
            optional=True,
        )
    ]


def _missing_boto3(facts: ServerFacts) -> list[MissingRequirement]:
    if facts.boto3:
        return []
    return [
        MissingRequirement(
            name="boto3",
            words="boto3 1.24 or newer is not installed: unless labctl can install it in its own "
            "venv, the server cannot use S3 and cannot save results by itself",
            command=_install_command(facts, "python3-boto3"),
            optional=True,
        )
    ]


def _is_new_enough(version: str) -> bool:
    numbers = tuple(int(part) for part in re.findall(r"[0-9]+", version)[:2])
    return numbers >= OLDEST_PYTHON


def _is_debian(facts: ServerFacts) -> bool:
    return any(name in facts.os for name in ("Debian", "Ubuntu", "Mint", "Pop!_OS"))


def _install_command(facts: ServerFacts, package: str) -> str:
    if _is_debian(facts):
        return f"sudo apt-get install --yes {package}"
    if package == "docker.io":
        return "install Docker Engine: https://docs.docker.com/engine/install/"
    return f"install {package} with the system's package manager"


def list_admin_commands(lacking: Iterable[MissingRequirement]) -> list[str]:
    """List the administrator's commands for `lacking`: one apt-get for all, no duplicates."""
    apt = "sudo apt-get install --yes "
    commands = list(dict.fromkeys(lack.command for lack in lacking))
    packages = [line.removeprefix(apt) for line in commands if line.startswith(apt)]
    others = [line for line in commands if not line.startswith(apt)]
    return ([apt + " ".join(packages)] if packages else []) + others
