"""One line of authorized_keys in or out: whom a store on an SSH server lets in, and to what.

A file of its own, standard library only: labctl runs it there through the person's own login.

    admit GATEWAY DIRECTORY LAB KEY    KEY may do what GATEWAY does in DIRECTORY, and no more;
                                       a key that LAB had before is let in no longer
    forget LAB                         LAB's key is let in no longer

`admit` makes DIRECTORY and prints its whole path. All other lines stay as they are.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
from pathlib import Path

SAFE_PATH = re.compile(r"[A-Za-z0-9._/+@~,=-]+")
SAFE_LAB = re.compile(r"[a-z0-9][a-z0-9-]{0,80}")
SAFE_KEY = re.compile(r"ssh-ed25519 [A-Za-z0-9+/=]{40,200}")
MARK = "labctl-store:"


def key_line(gateway: str, directory: str, lab: str, key: str) -> str:
    """What lets `key` in. ValueError where a part of it could mean more than it should."""
    for path in (gateway, directory, sys.executable):
        if not SAFE_PATH.fullmatch(path):
            raise ValueError(f"{path!r} cannot stand in authorized_keys")
    if not SAFE_KEY.fullmatch(key):
        raise ValueError("this is no ed25519 public key")
    words = f"{sys.executable} -I -S {gateway} serve {directory}"
    return f'restrict,command="{words}" {key} {MARK}{lab}'


def changed(text: str, lab: str, line: str) -> str:
    """authorized_keys without the lab's earlier line, and with `line` unless that is ""."""
    rows = text.split("\n")
    if not rows[-1]:
        rows.pop()
    kept = [one for one in rows if not one.rstrip().endswith(f" {MARK}{lab}")]
    return "".join(f"{one}\n" for one in [*kept, *([line] if line else [])])


def change(lab: str, line: str) -> None:
    if not SAFE_LAB.fullmatch(lab):
        raise ValueError(f"{lab!r} is no lab")
    folder = Path.home() / ".ssh"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = (folder / "authorized_keys").resolve()
    with (folder / ".labctl-store.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = path.read_bytes().decode(errors="surrogateescape") if path.exists() else ""
        after = changed(before, lab, line)
        if after == before:
            return
        draft = path.with_name(f".{path.name}.labctl-{os.getpid()}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with os.fdopen(os.open(draft, flags, 0o600), "wb") as file:
            file.write(after.encode(errors="surrogateescape"))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)


def main(words: list[str]) -> int:
    os.umask(0o077)
    try:
        if len(words) == 5 and words[0] == "admit":
            directory = Path(words[2]).expanduser()
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            place = str(directory.resolve())
            change(words[3], key_line(str(Path(words[1]).expanduser()), place, *words[3:]))
            print(place)
        elif len(words) == 2 and words[0] == "forget":
            change(words[1], "")
        else:
            raise ValueError("admit GATEWAY DIRECTORY LAB KEY | forget LAB")
    except (ValueError, OSError) as error:
        print(f"labctl store: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
