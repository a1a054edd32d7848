"""Leases on a machine that several people share: one POSIX script, and what its answer means.

A lease is a numbered directory on a local disk, and its mkdir is the claim. The highest number is
the current one; it is free when it is released, expired (seconds since boot, suspend included) or
from another boot, and taking over means making the next number. Only sh and coreutils are needed.

Two may still collide around a lease that was half-made or renewed late. So who made a directory
looks again at all leases before it (the one just before may be half-made, or be gone again), and
who wrote into one looks again whether it is the highest: one of the two sees the other, and gives
way.
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
# On a shared server (labctl/remote/broker.py) each account is claimed for itself.
own=/var/lib/labctl/leases/$(id -un)
[ "$dir" != /var/tmp/labctl-leases ] || [ ! -S /run/labctl/broker.sock ] || [ ! -d "$own" ] ||
  dir=$own
boot=$(cat /proc/sys/kernel/random/boot_id)
say() { printf '%s %s\n' "$1" "$2"; }

now() { read -r up _ </proc/uptime; now=${up%%.*}; }

newest() { # -> n: the highest generation, 0 for none
  n=0
  for each in "$dir"/lease-*; do
    number=${each##*/lease-}
    case $number in '' | 0* | *[!0-9]* | ?????????*) continue ;; esac
    [ "$number" -le "$n" ] || n=$number
  done
}

field() { # name -> value: a bare word or string of the owner's first two fields
  value=${owner#*\"$1\":}
  value=${value#\"}
  value=${value%%[!0-9a-z-]*}
}

look() { # generation, patience -> state, owner, left
  state=free owner='' left=0
  [ "$1" -gt 0 ] && [ ! -e "$dir/lease-$1/released" ] || return 0
  waited=0
  until [ -s "$dir/lease-$1/owner.json" ] || [ ! -d "$dir/lease-$1" ] || [ "$waited" -ge "$2" ]; do
    waited=$((waited + 1))
    sleep 0.1
  done
  [ -f "$dir/lease-$1/owner.json" ] || return 0
  IFS= read -r owner <"$dir/lease-$1/owner.json"
  case $owner in '{"boot_id":"'*'","expires_s":'[0-9]*) ;; *) owner=''; return 0 ;; esac
  field boot_id; [ "$value" = "$boot" ] || return 0
  now; field expires_s; left=$((value - now))
  [ "$left" -gt 0 ] || return 0
  state=held
  case $owner in *"\"token\":\"$token\""*) [ -z "$token" ] || state=mine ;; esac
}

write() { # generation, the owner's other fields
  now
  printf '{"boot_id":"%s","expires_s":%s,%s\n' "$boot" "$((now + span))" "$2" \
    >"$dir/lease-$1/.owner-$$" && mv "$dir/lease-$1/.owner-$$" "$dir/lease-$1/owner.json"
}

look_below() { # generation -> state: that of any before it which is not free
  for each in "$dir"/lease-*; do
    number=${each##*/lease-}
    case $number in '' | 0* | *[!0-9]* | ?????????*) continue ;; esac
    [ "$number" -lt "$1" ] || continue
    look "$number" 0
    [ "$state" = free ] || return 0
  done
  state=free
}

give_way() { rm -rf "$dir/lease-$1"; state=held; sleep 0.$(($$ % 5 + 1)); }

take() { # one attempt: -> state mine, or held
  newest; before=$n mine=$((n + 1))
  look "$before" 20
  [ "$state" != free ] || look_below "$mine"
  [ "$state" = free ] || return 0
  if ! mkdir "$dir/lease-$mine" 2>/dev/null; then
    newest; [ "$n" -ge "$mine" ] || { state=broken; return 0; }
    look "$n" 20
    [ "$state" = free ] && state=again
    return 0
  fi
  look_below "$mine"
  [ "$state" = free ] || { give_way "$mine"; state=again; return 0; }
  write "$mine" "$fields" || { rm -rf "$dir/lease-$mine"; state=broken; return 0; }
  newest
  [ "$n" -eq "$mine" ] || { give_way "$mine"; state=again; return 0; }
  look "$mine" 0
}

sweep() { # what we left in earlier generations
  for each in "$dir"/lease-*; do
    number=${each##*/lease-}
    case $number in '' | 0* | *[!0-9]* | ?????????*) continue ;; esac
    [ "$number" -lt $((n - 1)) ] && [ -O "$each" ] && rm -rf "$each"
  done
}

if [ "$action" = claim ]; then
  [ -d "$dir" ] || mkdir -m 1777 "$dir" 2>/dev/null || [ -d "$dir" ] ||
    { say state broken; say error "cannot make $dir"; exit 0; }
  kind=$(stat -f -c %T "$dir" 2>/dev/null)
  case $kind in nfs* | cifs* | smb* | afs* | v9fs | lustre | gpfs | ceph)
    say state broken; say error "$dir lies on a network filesystem ($kind)"; exit 0 ;;
  esac
  tries=0 state=again
  while [ "$state" = again ] && [ "$tries" -lt 20 ]; do
    take
    tries=$((tries + 1))
  done
  [ "$state" != again ] || state=held
  [ "$state" != broken ] || say error "cannot write to $dir"
  [ "$state" != mine ] || sweep
else
  newest
  look "$n" 20
fi
if [ "$state" = mine ]; then
  case $action in
    release) : >"$dir/lease-$n/released" && state=free ;;
    renew)
      rest=${owner#*\"expires_s\":}
      write "$n" "${rest#*,}"
      kept=$n; newest
      # Too late: what was just written must not keep others out.
      [ "$n" -eq "$kept" ] || : >"$dir/lease-$kept/released"
      look "$n" 0 ;;
  esac
fi
say state "$state"
say left "$left"
say owner "$owner"
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
