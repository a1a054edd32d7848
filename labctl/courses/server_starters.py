"""Write an assignment's starter into a lab on a seat's server, for students who use the browser."""

from __future__ import annotations

import io
import tarfile

from labctl.errors import TransferError
from labctl.model import Server
from labctl.servers.context import LabContext
from labctl.shell import command
from labctl.sync.starter import Starter

WRITE_S = 120.0
# The files arrive beside the code, and only those that are missing are moved there. It prints the
# paths of the student's own files that differ from the starter's.
_WRITE_SCRIPT = r"""
set -e; umask 022; cd "$HOME/labctl"
for lab in "$1" "$1-$2"; do
  if [ "$(cat "$lab/.labctl/id" 2>/dev/null)" = "$3" ]; then cd "$lab"; break; fi
done
[ "$(cat .labctl/id 2>/dev/null)" = "$3" ] || exit 1
mkdir -p code; new=$(mktemp -d .labctl/starter.XXXXXX); trap 'rm -rf "$new"' EXIT
tar -xmf - -C "$new" --no-same-owner  # with the time of now: an archive of a starter has none
find "$new" -type f | while IFS= read -r file; do
  path=${file#"$new"/}; own=code/$path
  if [ -e "$own" ] || [ -L "$own" ]; then cmp -s "$file" "$own" || printf '%s\n' "$path"
  else
    { mkdir -p "$(dirname "$own")" && mv -n "$file" "$own"; } 2>/dev/null || printf '%s\n' "$path"
  fi
done
"""


def write_starter(lab: LabContext, server: Server, starter: Starter) -> tuple[str, ...]:
    """Write the files that the lab's code does not have; return the paths of those that differ.

    A student's own file is never overwritten. TransferError if the files cannot be written.
    """
    words = (lab.config.name, lab.lab_id[:6], lab.lab_id)
    line = command("sh", "-c", _WRITE_SCRIPT, "sh", *words).render()
    connection = lab.connections.reopen(server)
    result = connection.run(line, stdin=_pack(starter), timeout_s=WRITE_S, check=False)
    if result.code:
        raise TransferError(
            f"the files of {starter.assignment} could not be written to your server",
            why="its disk may be full, or the lab is gone",
        )
    own = set(result.stdout.splitlines())
    return tuple(file.path for file in starter.files if file.path in own)


def _pack(starter: Starter) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for file in starter.files:
            entry = tarfile.TarInfo(file.path)
            entry.size, entry.mode = len(file.content), 0o755 if file.executable else 0o644
            archive.addfile(entry, io.BytesIO(file.content))
    return packed.getvalue()
