umask 022
# On a shared server (labctl/agent/broker/broker.py) each account is claimed for itself.
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
