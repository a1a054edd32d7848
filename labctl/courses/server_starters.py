"""Write assignments' starters into the seat's own lab on its server, for students in the browser.

All assignments share the lab's code. What each of them delivered is kept in `.labctl/starters`, so
a newer version replaces only files that the student has not changed.
"""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Iterator

from labctl.courses.records.folder import CourseFolder
from labctl.courses.starters import find_published, list_published
from labctl.errors import TransferError
from labctl.model import NAME_PATTERN, Server, Value
from labctl.servers.context import LabContext
from labctl.shell import command
from labctl.sync.starter import Starter, find_path_problem
from labctl.sync.starter_update import CONFLICT, Action, FileChange
from labctl.wire.files import DELIVERED

WRITE_S = 120.0
# What happened to a path whose file came from another assignment, in the script's output.
_OTHER = "other"
_PLAIN: dict[str, Action] = {
    "added": "added",
    "updated": "updated",
    "removed": "removed",
    "kept": "kept",
}
# The files arrive beside the code. For each that needed something, it prints the action, what
# belongs to it (the file beside, or another assignment), and the path. A path has no control
# characters. With "restore", deleted files come back, and all that differ are printed.
_WRITE_SCRIPT = r"""
set -e; umask 022; cd "$HOME/labctl"
for lab in "$1" "$1-$2"; do
  if [ "$(cat "$lab/.labctl/id" 2>/dev/null)" = "$3" ]; then cd "$lab"; break; fi
done
[ "$(cat .labctl/id 2>/dev/null)" = "$3" ] || exit 1
all=$4 base=$4/$5 restore=$6
mkdir -p code "$base"; new=$(mktemp -d .labctl/starter.XXXXXX); trap 'rm -rf "$new"' EXIT
mkdir "$new/files"
tar -xmf - -C "$new/files" --no-same-owner  # with the time of now: an archive of a starter has none
is_there() { [ -e "$1" ] || [ -L "$1" ]; }
is_file() { [ -f "$1" ] && [ ! -L "$1" ]; }
is_same() { is_file "$1" && is_file "$2" && cmp -s "$1" "$2"; }
say() { printf '%s\t%s\t%s\n' "$1" "$2" "$path"; }
place() {  # false if something is in the way
  mkdir -p "$(dirname "$2")" 2>/dev/null || return 1
  cp -p "$1" "$new/one" && mv -f "$new/one" "$2" || exit 1
}
find_other() {
  for one in "$all"/*/; do
    if [ "$one" != "$base/" ] && is_file "$one$path"; then basename "$one"; break; fi
  done
}
name_beside() {
  beside=$path.conflict number=1
  while is_there "code/$beside" && ! is_same "code/$beside" "$file"; do
    number=$((number + 1)); beside=$path.conflict-$number
  done
}
update() {
  if ! is_there "$own"; then
    if [ -z "$restore" ] && is_file "$old"; then
      is_same "$old" "$file" || say kept ''
    elif place "$file" "$own"; then say added ''
    else say blocked ''; return 0
    fi
  elif is_same "$own" "$file"; then :
  elif is_same "$own" "$old"; then place "$file" "$own"; say updated ''
  elif is_same "$old" "$file"; then [ -z "$restore" ] || say kept ''
  elif ! is_file "$own"; then say blocked ''; return 0
  elif ! is_file "$old" && other=$(find_other) && [ "$other" ]; then say other "$other"; return 0
  else name_beside; place "$file" "code/$beside"; say conflict "$beside"
  fi
  mkdir -p "$(dirname "$old")" && mv -f "$file" "$old" || exit 1
}
prune() { (cd "$1"; rm -f "$path"; rmdir -p "$(dirname "$path")" 2>/dev/null) || :; }
remove() {  # what the course no longer hands out
  if is_same "$own" "$old"; then prune code; say removed ''
  elif is_there "$own"; then say kept ''
  fi
  prune "$base"
}
{ (cd "$new/files"; find . -type f); (cd "$base"; find . -type f); } | sort -u |
while IFS= read -r path; do
  path=${path#./}; own=code/$path file=$new/files/$path old=$base/$path
  if is_file "$file"; then update; else remove; fi
done
"""


class SeatStarter(Value, frozen=True):
    """What a push did with one assignment's files in a lab on a server. `kept` has its reasons."""

    assignment: str
    changes: tuple[FileChange, ...] = ()


def read_in_order(folder: CourseFolder) -> tuple[Starter, ...]:
    """Read the published starters, the earliest due first: the first one gets a path that two have.

    Those without a due time come last.
    """
    rules = folder.config.assignments

    def order(name: str) -> tuple[float, str]:
        due = rules[name].due if name in rules else None
        return (due.at if due else math.inf, name)

    starters = (find_published(folder, name) for name in sorted(list_published(folder), key=order))
    return tuple(starter for starter in starters if starter is not None)


def write_starter(
    lab: LabContext, server: Server, starter: Starter, *, restore: bool = False
) -> tuple[FileChange, ...]:
    """Bring the lab's code to this version of a starter; return what was done, or could not be.

    A file that the student changed is never overwritten. The course's version of one that both
    changed is written beside it. A file of another assignment is `kept`. With `restore`, deleted
    files come back, and every file of the student's that differs is reported. TransferError if the
    files cannot be written.
    """
    words = (lab.config.name, lab.lab_id[:6], lab.lab_id, DELIVERED, starter.assignment)
    line = command("sh", "-c", _WRITE_SCRIPT, "sh", *words, "restore" * restore).render()
    connection = lab.connections.reopen(server)
    result = connection.run(line, stdin=_pack(starter), timeout_s=WRITE_S, check=False)
    if result.code:
        raise TransferError(
            f"the files of {starter.assignment} could not be written to the server",
            why="its disk may be full, or the lab is gone",
        )
    return tuple(parse_changes(result.stdout))


def parse_changes(output: str) -> Iterator[FileChange]:
    """Parse the script's output; the server's word is not trusted."""
    for line in output.splitlines():
        action, _, rest = line.partition("\t")
        detail, _, path = rest.partition("\t")
        if find_path_problem(path):
            continue
        if action == _OTHER:
            if NAME_PATTERN.fullmatch(detail):
                yield FileChange(path=path, action="kept", why=f"{detail} has a file of this path")
        elif action == "blocked":
            why = "something else than a file is there, or above it"
            yield FileChange(path=path, action="blocked", why=why, blocked_by=path)
        elif action == "conflict":
            if detail.startswith(path + CONFLICT) and not find_path_problem(detail):
                yield FileChange(path=path, action="conflict", beside=detail)
        elif done := _PLAIN.get(action):
            yield FileChange(path=path, action=done)


def _pack(starter: Starter) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for file in starter.files:
            entry = tarfile.TarInfo(file.path)
            entry.size, entry.mode = len(file.content), 0o755 if file.executable else 0o644
            archive.addfile(entry, io.BytesIO(file.content))
    return packed.getvalue()
