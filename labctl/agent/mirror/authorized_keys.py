"""Adds or removes a line of authorized_keys: access of a lab's key to a store on an SSH server.

A self-contained file (standard library only) that labctl runs there through the person's own login.

    admit DIRECTORY LAB KEY    install the gateway from stdin, let KEY run only this
                               gateway in DIRECTORY, and remove the key that LAB had before
    forget LAB                 remove LAB's key

`admit` creates DIRECTORY. All other lines stay as they are.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sys
from pathlib import Path

SAFE_PATH = re.compile(r"[A-Za-z0-9._/+@~,=-]+")
SAFE_LAB = re.compile(r"[a-z0-9][a-z0-9-]{0,80}")
SAFE_KEY = re.compile(r"ssh-ed25519 [A-Za-z0-9+/=]{40,200}")
MARK = "labctl-store:"
PROGRAMS = Path(".local/share/labctl")


def build_key_line(gateway: str, directory: str, lab: str, key: str) -> str:
    """Return the line that admits `key`. ValueError if a part of it could have a second meaning."""
    for path in (gateway, directory, sys.executable):
        if not SAFE_PATH.fullmatch(path):
            raise ValueError(f"{path!r} contains characters that authorized_keys does not allow")
    if not SAFE_KEY.fullmatch(key):
        raise ValueError("not an ed25519 public key")
    words = f"{sys.executable} -I -S {gateway} serve {directory}"
    return f'restrict,command="{words}" {key} {MARK}{lab}'


def replace_line(text: str, lab: str, line: str) -> str:
    """Return authorized_keys without the lab's earlier line, and with `line` unless it is ""."""
    rows = text.split("\n")
    if not rows[-1]:
        rows.pop()
    other_rows = [row for row in rows if not row.rstrip().endswith(f" {MARK}{lab}")]
    return "".join(f"{row}\n" for row in [*other_rows, *([line] if line else [])])


def rewrite_keys(lab: str, line: str) -> None:
    if not SAFE_LAB.fullmatch(lab):
        raise ValueError(f"{lab!r} is not a lab name")
    folder = Path.home() / ".ssh"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = (folder / "authorized_keys").resolve()
    with (folder / ".labctl-store.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = path.read_bytes().decode(errors="surrogateescape") if path.exists() else ""
        after = replace_line(before, lab, line)
        if after == before:
            return
        write_file(path, after.encode(errors="surrogateescape"))


def write_file(path: Path, content: bytes) -> None:
    """Write a file of this account only, completely or not at all."""
    draft = path.with_name(f".{path.name}.labctl-{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with os.fdopen(os.open(draft, flags, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def install_gateway(content: bytes) -> Path:
    """Install the gateway beside those of other versions, which other keys may still run."""
    name = f"store-gateway-{hashlib.sha256(content).hexdigest()[:16]}.py"
    path = Path.home() / PROGRAMS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, content)
    return path


def main(words: list[str]) -> int:
    os.umask(0o077)
    try:
        if len(words) == 4 and words[0] == "admit":
            directory, lab, key = Path(words[1]), words[2], words[3]
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            gateway = install_gateway(sys.stdin.buffer.read())
            rewrite_keys(lab, build_key_line(str(gateway), str(directory.resolve()), lab, key))
        elif len(words) == 2 and words[0] == "forget":
            rewrite_keys(words[1], "")
        else:
            raise ValueError("usage: admit DIRECTORY LAB KEY | forget LAB")
    except (ValueError, OSError) as error:
        print(f"labctl store: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
