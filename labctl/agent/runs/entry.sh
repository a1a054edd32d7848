#!/bin/sh
# Starts a run's command, forwards signals, and records how it ended.
# /bin/sh only: in a container, the image is the student's own. Arguments: the command.
# Without a container, LABCTL_ATTEMPT names the directory of the attempt's own records.
run=${0%/.labctl/entry.sh}
secrets=${LABCTL_SECRETS_DIR:-/run/labctl-secrets}
if [ -d "$secrets" ]; then
  for file in "$secrets"/*; do
    [ -f "$file" ] || continue
    value=$(cat "$file"; printf x)
    export "${file##*/}=${value%x}"
  done
fi
umask 022
start_trackers() { :; }
stop_trackers() { :; }
[ ! -r "$run/.labctl/trackers.sh" ] || . "$run/.labctl/trackers.sh"
if [ -n "$LABCTL_ENTER" ]; then
  if ! command -v "$1" >/dev/null 2>&1; then
    what="the image of this run"
    [ -z "$LABCTL_ATTEMPT" ] || what="the server"
    echo "labctl: $what has no program $1" >&2
    exit 127
  fi
  exec "$@"
fi
# Two terminals may start the same container, one after its command has ended: it runs once.
[ ! -e "$run/.labctl/exit.json" ] || exit 125
if [ -n "$LABCTL_ATTEMPT" ]; then
  # A repeated start finds the directory. The start time tells this process from a later one with
  # the same number.
  mkdir "$LABCTL_ATTEMPT/started" 2>/dev/null || exit 125
  printf '{"pid":%d,"start_ticks":%d}\n' $$ "$(cut -d ' ' -f 22 /proc/$$/stat)" \
    >"$LABCTL_ATTEMPT/process.new" && mv "$LABCTL_ATTEMPT/process.new" "$LABCTL_ATTEMPT/process.json"
fi
if [ ! -t 0 ]; then
  exec >>"$run/logs/run.log" 2>&1
fi
asked=
forward() {
  asked=$1
  [ -z "$child" ] || kill "-$1" "$child" 2>/dev/null
}
trap 'forward TERM' TERM
trap 'forward INT' INT
trap 'forward HUP' HUP
if [ -t 0 ]; then
  # The terminal sends Ctrl-C to the command too, and a shell has its background commands ignore that.
  trap 'asked=INT' INT
  ! env --default-signal=INT true 2>/dev/null || set -- env --default-signal=INT "$@"
fi
start_trackers
exec 3<&0
"$@" <&3 &
child=$!
[ -z "$asked" ] || kill "-$asked" "$child" 2>/dev/null
while :; do
  wait "$child"
  code=$?
  # A trapped signal ends `wait` early; the child may still be writing its checkpoint.
  kill -0 "$child" 2>/dev/null || break
done
if [ "$code" -gt 128 ]; then
  # The child may have ended just after a signal ended `wait`: then its own code is still available.
  wait "$child" 2>/dev/null
  own=$?
  [ "$own" -eq 127 ] || code=$own
fi
stop_trackers
first() { for file in "$@"; do [ -r "$file" ] && { cat "$file"; return; }; done; echo 0; }
peak=0 kills=
# Without a container, and in those of a job, these files are about the whole machine or another group.
if [ -z "$LABCTL_ATTEMPT$SLURM_JOB_ID" ]; then
  peak=$(first /sys/fs/cgroup/memory.peak /sys/fs/cgroup/memory/memory.max_usage_in_bytes)
  kills=$( { cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null || :; } |
    while read -r key count; do [ "$key" = oom_kill ] && echo "$count"; done)
fi
set -- $kills
printf '{"code":%d,"peak_memory_bytes":%s,"oom_kills":%s,"ended_at":%s,"asked":"%s"}\n' \
  "$code" "$peak" "${1:-0}" "$(date +%s)" "$asked" >"$run/.labctl/exit.new" &&
  mv "$run/.labctl/exit.new" "$run/.labctl/exit.json"
exit "$code"
