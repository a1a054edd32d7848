"""Command lines, environment and inventory of Ansible. Pure functions; nothing runs here.

Ansible reaches servers through the generated ssh_config of each, so host keys stay pinned and the
user's own settings (jump hosts, agents) keep working.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from labctl.model import Value

GROUP = "labctl"

SSH_ARGS = (
    "-o ControlMaster=auto -o ControlPersist=15s -o BatchMode=yes "
    "-o ServerAliveInterval=2 -o ServerAliveCountMax=3"
)


class Host(Value, frozen=True):
    """A server in the inventory. `ssh_config` is an absolute path, `stamp` may be empty.

    `boto3`: the server calls AWS itself.
    """

    alias: str
    ssh_config: Path
    user: str
    stamp: str = ""
    boto3: bool = False


def compute_stamp(files: Mapping[str, bytes]) -> str:
    """Return the content hash (hex) of files by relative path, the stamp of a prepared server."""
    digest = hashlib.sha256()
    for path in sorted(files):
        content = hashlib.sha256(files[path]).hexdigest()
        digest.update(f"{content}  {path}\n".encode())
    return digest.hexdigest()


def build_host_variables(host: Host) -> dict[str, str | bool]:
    """Return the Ansible variables of one host. A root login needs no sudo, and may lack it."""
    variables: dict[str, str | bool] = {
        "ansible_ssh_common_args": f"-F {shlex.quote(str(host.ssh_config))}",
    }
    if host.user == "root":
        variables["ansible_become"] = False
    if host.stamp:
        variables["lab_server_stamp"] = host.stamp
    if host.boto3:
        variables["lab_server_boto3"] = True
    return variables


def build_inventory(hosts: Sequence[Host]) -> str:
    """Build a YAML inventory, for `ansible-playbook -i FILE playbooks/server.yml -K`."""
    lines = [f"{GROUP}:", "  hosts:" + ("" if hosts else " {}")]
    for host in hosts:
        lines.append(f"    {json.dumps(host.alias)}:")
        for name, value in build_host_variables(host).items():
            lines.append(f"      {name}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def playbook_argv(
    python: str,
    playbooks_dir: Path,
    inventory_file: Path,
    *,
    home: Path,
    locale: str,
    name: str = "server.yml",
    variables: Path | None = None,
) -> list[str]:
    """Build argv that runs a playbook and prints its tasks as one JSON object per line on stdout.

    It starts with `env`, which extends the environment without this module reading it. `home` is a
    directory with a short name for Ansible's own files: it contains the SSH master's socket, and
    macOS allows about 100 bytes for that path. Ansible requires a UTF-8 `locale`. `variables` is a
    JSON or YAML file that overrides the playbook's own variables.
    """
    return [
        "env",
        *(
            f"{name}={value}"
            for name, value in build_environment(playbooks_dir, home, locale).items()
        ),
        python,
        "-P",
        "-m",
        "ansible",
        "playbook",
        "--inventory",
        str(inventory_file),
        *(("--extra-vars", f"@{variables}") if variables else ()),
        str(playbooks_dir / name),
    ]


def build_environment(playbooks_dir: Path, home: Path, locale: str) -> dict[str, str]:
    """Return the environment variables for Ansible.

    They name the configuration file, since Ansible would otherwise use any ansible.cfg in its
    working directory. Its SSH master is separate and short-lived: the master of the user's sessions
    would keep the groups (docker) that the user had before.
    """
    return {
        "ANSIBLE_CONFIG": str(playbooks_dir / "ansible.cfg"),
        "ANSIBLE_HOME": str(home),
        "ANSIBLE_LOCAL_TEMP": str(home / "tmp"),
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(home / "cp"),
        "ANSIBLE_SSH_ARGS": SSH_ARGS,
        "ANSIBLE_HOST_KEY_CHECKING": "True",
        "ANSIBLE_PIPELINING": "True",
        "ANSIBLE_STDOUT_CALLBACK": "labctl_events",
        "ANSIBLE_CALLBACK_PLUGINS": str(playbooks_dir / "callback_plugins"),
        "ANSIBLE_NOCOLOR": "True",
        "ANSIBLE_FORCE_COLOR": "False",
        "LC_ALL": locale,
    }


def end_master_argv(control_path: Path) -> list[str]:
    """Build argv that stops the SSH master at this socket. ssh ignores the host name here."""
    return ["ssh", "-F", "/dev/null", "-S", str(control_path), "-O", "exit", "--", "master"]
