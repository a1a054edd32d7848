#!/usr/bin/python3
"""Applies the parts of user-data that a login needs, for machines with only sshd (no cloud-init).

These are the host key, authorized keys and host name of every cloud-config part.
"""

import email
import pwd
import shutil
import socket
from pathlib import Path

import yaml

USER = pwd.getpwnam("ubuntu")
HOST_KEY = Path("/etc/ssh/ssh_host_ed25519_key")
SUDOERS = Path("/etc/sudoers.d/90-cloud-init-users")


def parse_configs(text: str) -> list[dict]:
    if text.startswith("#cloud-config"):
        return [yaml.safe_load(text)]
    parts = [part for part in email.message_from_string(text).walk() if not part.is_multipart()]
    config_parts = [part for part in parts if part.get_content_type() == "text/cloud-config"]
    return [yaml.safe_load(part.get_payload(decode=True)) for part in config_parts]


def list_keys(config: dict) -> list[str]:
    users = [user for user in config.get("users", []) if isinstance(user, dict)]
    return [
        *config.get("ssh_authorized_keys", []),
        *(key for user in users for key in user.get("ssh_authorized_keys", [])),
    ]


keys: list[str] = []
for config in parse_configs(Path("/rehearsal/machine/seed/user-data").read_text()):
    keys += list_keys(config)
    if private := config.get("ssh_keys", {}).get("ed25519_private"):
        HOST_KEY.touch(0o600)
        HOST_KEY.write_text(private if private.endswith("\n") else f"{private}\n")
    if name := config.get("hostname"):
        socket.sethostname(name)
SUDOERS.touch(0o440)
SUDOERS.write_text("ubuntu ALL=(ALL) NOPASSWD:ALL\n")
folder = Path(USER.pw_dir, ".ssh")
folder.mkdir(mode=0o700, exist_ok=True)
authorized = folder / "authorized_keys"
authorized.touch(0o600)
authorized.write_text("".join(f"{key}\n" for key in dict.fromkeys(keys)))
for path in (folder, authorized):
    shutil.chown(path, USER.pw_uid, USER.pw_gid)
