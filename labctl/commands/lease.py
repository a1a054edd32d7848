"""Leases on a machine that several users share: one POSIX script, and the parser of its output.

A lease is a JSON file in a numbered directory that its holder owns, so that no other account can
change it. It is valid until it is released, has expired (seconds since boot, suspend included), or
the machine reboots; the next lease gets the next number. A released lease is deleted, so that none
stays on a machine that nobody uses. flock(1) lets one labctl at a time change leases.

Older versions of labctl take no lock: their mkdir is the claim. So a claim checks again after its
mkdir, and once more after its file is written, and gives way to any claim in between. The older
version does the same, so that of two claims at least one sees the other.
"""

from __future__ import annotations

import shlex
from typing import Literal

import msgspec

from labctl.commands.shell_output import parse_gpus, parse_int_or_zero
from labctl.decoding import decode_json
from labctl.errors import ProviderError
from labctl.model import Gpu, Value

DIRECTORY = "/var/tmp/labctl-leases"
_MOST_TEXT = 200

State = Literal["free", "held", "mine", "broken"]
_STATES: dict[str, State] = {"free": "free", "held": "held", "mine": "mine", "broken": "broken"}


class Holder(Value, frozen=True):
    """The holder of a lease, as the holder's labctl wrote it. `created_at` in Unix seconds."""

    token: str
    lab: str
    lab_id: str
    owner: str
    created_at: float


class _Owner(Holder, frozen=True):
    boot_id: str
    expires_s: int


class MachineLease(Value, frozen=True):
    """The lease of a machine. "mine": the caller's token holds it. `left_s`: until it expires.

    "broken": the machine cannot store leases; `error` says why.
    """

    state: State
    holder: Holder | None = None
    left_s: int = 0
    gpus: tuple[Gpu, ...] = ()
    error: str = ""


def show(token: str = "", *, directory: str = DIRECTORY) -> str:
    """Build the line that reads the lease (and the machine's GPUs) and changes nothing."""
    return _build_line("show", token, directory)


def claim(holder: Holder, span_s: int, *, directory: str = DIRECTORY) -> str:
    """Build the line that claims the lease for `span_s` seconds, or prints who holds it.

    Repeated with the same token, it keeps the lease.
    """
    fields = msgspec.json.encode(holder).decode()[1:]
    return _build_line("claim", holder.token, directory, span=str(span_s), fields=fields)


def renew(token: str, span_s: int, *, directory: str = DIRECTORY) -> str:
    """Build the line that has the lease end `span_s` seconds from now, if `token` holds it."""
    return _build_line("renew", token, directory, span=str(span_s))


def release(token: str, *, directory: str = DIRECTORY) -> str:
    """Build the line that releases the lease if `token` holds it; otherwise it changes nothing."""
    return _build_line("release", token, directory)


def _build_line(action: str, token: str, directory: str, **more: str) -> str:
    values = {"action": action, "token": token, "dir": directory, "span": "0", "fields": "", **more}
    assignments = "; ".join(f"{name}={shlex.quote(value)}" for name, value in values.items())
    return f"{assignments}\n{_SCRIPT}"


_SCRIPT = r"""
umask 022
# On a shared server (labctl/agent/broker/broker.py) each account has a lease of its own.
own=/var/lib/labctl/leases/$(id -un)
[ "$dir" != /var/tmp/labctl-leases ] || [ ! -S /run/labctl/broker.sock ] || [ ! -d "$own" ] ||
  dir=$own
boot=$(cat /proc/sys/kernel/random/boot_id)
error=
say() { printf '%s %s\n' "$1" "$2"; }

holds() { # lease -> owner, left_s
  owner=
  [ -f "$1/owner.json" ] && [ ! -e "$1/released" ] || return 1
  # A reader holds no lock, so a sweep may remove the file at this moment.
  { IFS= read -r owner <"$1/owner.json"; } 2>/dev/null
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
  [ "$state" != free ] || state=held # an older labctl is claiming it, or gives way as well
}

sweep() { # delete this account's earlier leases
  for number in $numbers; do
    [ "$number" -ge $((n - 1)) ] || [ ! -O "$dir/lease-$number" ] || rm -rf "$dir/lease-$number"
  done
}

tidy() { # delete what is left of the lease that was given back, and of this account's earlier ones
  look
  for number in $numbers; do
    [ "$number" -le "$given_back" ] && [ -O "$dir/lease-$number" ] || continue
    holds "$dir/lease-$number" || rm -rf "$dir/lease-$number"
  done
}

renew() {
  look
  [ "$state" = mine ] || return 0
  kept=$held rest=${holder#*'"expires_s":'}
  write "$kept" "${rest#*,}"
  look
  # Too late: the lease that was just written must not block others.
  [ "$n" -eq "$kept" ] || { give_back "$kept"; look; }
}

alone() { # command: runs it while no other labctl changes a lease
  { timeout 20 flock 9 && { "$1"; :; }; } 2>/dev/null 9<"$dir" || error="cannot lock $dir by flock"
}

if [ "$action" = claim ]; then
  [ -d "$dir" ] || mkdir -m 1777 "$dir" 2>/dev/null || [ -d "$dir" ] || error="cannot make $dir"
  # The labctl of another account has just made it, and opens it to all next.
  [ -w "$dir" ] || sleep 1
  kind=$(stat -f -c %T "$dir" 2>/dev/null)
  case $kind in nfs* | cifs* | smb* | afs* | v9fs | lustre | gpfs | ceph)
    error="$dir is on a network filesystem ($kind)" ;;
  esac
fi
look
case $action-$state in
  claim-free) [ -n "$error" ] || alone claim ;;
  renew-mine) alone renew ;;
  release-mine) given_back=$held; give_back "$held" && look && { alone tidy; error=; } ;;
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


def parse(stdout: str) -> MachineLease:
    """Parse the script's output. ProviderError if it is not in the script's format."""
    values: dict[str, list[str]] = {}
    for line in stdout.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key, []).append(value)
    state = _STATES.get(values.get("state", [""])[0])
    if state is None:
        raise ProviderError(
            "the machine's reply about its lease cannot be read",
            why=f"it printed {stdout[:_MOST_TEXT]!a}",
            hint=lambda subject: subject.check,
        )
    return MachineLease(
        state=state,
        holder=_parse_holder(values.get("owner", [""])[0]) if state in ("held", "mine") else None,
        left_s=parse_int_or_zero(values.get("left", ["0"])[0]),
        gpus=parse_gpus(values.get("gpu", [])),
        error=values.get("error", [""])[0],
    )


def _parse_holder(text: str) -> Holder | None:
    """Parse a lease file; None if another program, or a malicious user, wrote something else."""
    try:
        owner = decode_json(text, _Owner)
    except msgspec.MsgspecError:
        return None
    return Holder(
        token=owner.token,
        lab=owner.lab[:_MOST_TEXT],
        lab_id=owner.lab_id,
        owner=owner.owner[:_MOST_TEXT],
        created_at=owner.created_at,
    )
