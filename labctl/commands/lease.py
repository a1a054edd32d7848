"""Leases on a machine that several people share: one POSIX script, and what its answer means.

A lease is a JSON file in a numbered directory that its holder owns, so that no other account can
change it. It holds until it is released, has expired (seconds since boot, suspend included), or
the machine boots again; the next one gets the next number. flock(1) has one labctl at a time
change leases.

An earlier labctl takes no lock: its mkdir is the claim. So a claim looks again after its mkdir, and
once more after its file is there, and gives way to whatever came in between. The earlier one does
the same, and of two at least one sees the other.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Literal

import msgspec

from labctl.errors import ProviderError
from labctl.model import Gpu, Value

DIRECTORY = "/var/tmp/labctl-leases"
_MOST_TEXT = 200

State = Literal["free", "held", "mine", "broken"]
_STATES: dict[str, State] = {"free": "free", "held": "held", "mine": "mine", "broken": "broken"}


class Holder(Value, frozen=True):
    """Who holds a lease, as the holder's labctl wrote it. `created_at` in Unix seconds."""

    token: str
    lab: str
    lab_id: str
    owner: str
    created_at: float


class _Owner(Holder, frozen=True):
    boot_id: str
    expires_s: int


class Lease(Value, frozen=True):
    """What a machine said. "mine": the token asked with holds it. `left_s` until it expires.

    "broken": no lease can be kept there; `error` says why.
    """

    state: State
    holder: Holder | None = None
    left_s: int = 0
    gpus: tuple[Gpu, ...] = ()
    error: str = ""


def show(token: str = "", *, directory: str = DIRECTORY) -> str:
    """The line that reads the lease (and the machine's GPUs) and changes nothing."""
    return _line("show", token, directory)


def claim(holder: Holder, span_s: int, *, directory: str = DIRECTORY) -> str:
    """The line that takes the lease for `span_s` seconds, or says who holds it.

    Repeated with the same token, it keeps the lease.
    """
    fields = msgspec.json.encode(holder).decode()[1:]
    return _line("claim", holder.token, directory, span=str(span_s), fields=fields)


def renew(token: str, span_s: int, *, directory: str = DIRECTORY) -> str:
    """The line that has the lease end `span_s` seconds from now, where `token` holds it."""
    return _line("renew", token, directory, span=str(span_s))


def release(token: str, *, directory: str = DIRECTORY) -> str:
    """The line that gives the lease back, where `token` holds it; else it changes nothing."""
    return _line("release", token, directory)


def _line(action: str, token: str, directory: str, **more: str) -> str:
    values = {"action": action, "token": token, "dir": directory, "span": "0", "fields": "", **more}
    assigned = "; ".join(f"{name}={shlex.quote(value)}" for name, value in values.items())
    return f"{assigned}\n{_SCRIPT}"


_SCRIPT = r"""
umask 022
# On a shared server (labctl/agent/broker/broker.py) each account is claimed for itself.
own=/var/lib/labctl/leases/$(id -un)
[ "$dir" != /var/tmp/labctl-leases ] || [ ! -S /run/labctl/broker.sock ] || [ ! -d "$own" ] ||
  dir=$own
boot=$(cat /proc/sys/kernel/random/boot_id)
error=
say() { printf '%s %s\n' "$1" "$2"; }

holds() { # lease -> owner, left_s
  owner=
  [ -f "$1/owner.json" ] && [ ! -e "$1/released" ] || return 1
  IFS= read -r owner <"$1/owner.json"
  case $owner in '{"boot_id":"'"$boot"'","expires_s":'[1-9]*) ;; *) return 1 ;; esac
  left_s=${owner#*'"expires_s":'}
  read -r up _ </proc/uptime
  left_s=$((${left_s%%[!0-9]*} - ${up%%.*}))
  [ "$left_s" -gt 0 ]
}

look() { # -> numbers; n: the highest of them; held: the highest that holds; state, holder, left
  numbers='' n=0 held=0 state=free holder='' left=0
  for each in "$dir"/lease-*; do
    number=${each##*/lease-}
    case $number in '' | 0* | *[!0-9]* | ?????????*) continue ;; esac
    numbers="$numbers $number"
    [ "$number" -le "$n" ] || n=$number
    [ "$number" -gt "$held" ] && holds "$each" || continue
    state=held held=$number holder=$owner left=$left_s
  done
  case $holder in *"\"token\":\"$token\""*) [ -z "$token" ] || state=mine ;; esac
}

write() { # number, the owner's other fields
  read -r up _ </proc/uptime
  printf '{"boot_id":"%s","expires_s":%s,%s\n' "$boot" "$((${up%%.*} + span))" "$2" \
    >"$dir/lease-$1/.owner-$$" && mv "$dir/lease-$1/.owner-$$" "$dir/lease-$1/owner.json"
}

give_back() { printf '' >"$dir/lease-$1/released"; }

claim() {
  look
  [ "$state" = free ] || return 0
  new=$((n + 1))
  if mkdir "$dir/lease-$new"; then
    look
    [ "$state" != free ] || write "$new" "$fields" || error="cannot write to $dir"
    look
    [ "$n-$held-$state" != "$new-$new-mine" ] || { sweep; return; }
    rm -rf "$dir/lease-$new"
  elif [ ! -d "$dir/lease-$new" ]; then
    error="cannot write to $dir"
  fi
  look
  [ "$state" != free ] || state=held # an earlier labctl is at it, or gives way as well
}

sweep() { # what this account has left in earlier leases
  for number in $numbers; do
    [ "$number" -ge $((n - 1)) ] || [ ! -O "$dir/lease-$number" ] || rm -rf "$dir/lease-$number"
  done
}

renew() {
  look
  [ "$state" = mine ] || return 0
  kept=$held rest=${holder#*'"expires_s":'}
  write "$kept" "${rest#*,}"
  look
  # Too late: what was just written must not keep others out.
  [ "$n" -eq "$kept" ] || { give_back "$kept"; look; }
}

alone() { # change: made while no other labctl changes a lease
  { timeout 20 flock 9 && { "$1"; :; }; } 2>/dev/null 9<"$dir" || error="cannot lock $dir by flock"
}

if [ "$action" = claim ]; then
  [ -d "$dir" ] || mkdir -m 1777 "$dir" 2>/dev/null || [ -d "$dir" ] || error="cannot make $dir"
  kind=$(stat -f -c %T "$dir" 2>/dev/null)
  case $kind in nfs* | cifs* | smb* | afs* | v9fs | lustre | gpfs | ceph)
    error="$dir lies on a network filesystem ($kind)" ;;
  esac
fi
look
case $action-$state in
  claim-free) [ -n "$error" ] || alone claim ;;
  renew-mine) alone renew ;;
  release-mine) give_back "$held" && look ;;
esac
[ -z "$error" ] || state=broken
say state "$state"
say left "$left"
say owner "$holder"
say error "$error"
[ "$action" = show ] && command -v nvidia-smi >/dev/null 2>&1 &&
  nvidia-smi --query-gpu=uuid,memory.total,driver_version,name --format=csv,noheader,nounits \
    2>/dev/null | while IFS= read -r gpu; do say gpu "$gpu"; done
:
"""


def parse(stdout: str) -> Lease:
    """What the script said. ProviderError where it said nothing that makes sense."""
    said: dict[str, list[str]] = {}
    for line in stdout.splitlines():
        key, _, value = line.partition(" ")
        said.setdefault(key, []).append(value)
    state = _STATES.get(said.get("state", [""])[0])
    if state is None:
        raise ProviderError(
            "the machine's answer about its lease makes no sense",
            why=f"it said {stdout[:_MOST_TEXT]!a}",
            hint="labctl doctor",
        )
    return Lease(
        state=state,
        holder=_holder(said.get("owner", [""])[0]) if state in ("held", "mine") else None,
        left_s=_whole(said.get("left", ["0"])[0]),
        gpus=tuple(_gpus(said.get("gpu", []))),
        error=said.get("error", [""])[0],
    )


def _holder(text: str) -> Holder | None:
    """None for what another program, or somebody in bad faith, wrote there."""
    try:
        found = msgspec.json.decode(text, type=_Owner)
    except msgspec.MsgspecError:
        return None
    return Holder(
        token=found.token,
        lab=found.lab[:_MOST_TEXT],
        lab_id=found.lab_id,
        owner=found.owner[:_MOST_TEXT],
        created_at=found.created_at,
    )


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def _gpus(rows: list[str]) -> Iterator[Gpu]:
    """GPUs of nvidia-smi's rows (uuid, MiB, driver, name); any other line is an error message."""
    for row in rows:
        fields = [field.strip() for field in row.split(",", 3)]
        if len(fields) == 4 and fields[0].startswith(("GPU-", "MIG-")):
            uuid, mib, driver, name = fields
            yield Gpu(name=name, uuid=uuid, memory_bytes=_whole(mib) * 1024**2, driver=driver)
