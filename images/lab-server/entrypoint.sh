#!/bin/bash
# The lab server's boot: the tasks of an init system on a real machine. An init (docker run --init)
# above it reaps orphans. Both daemons are restarted when they die; SIGTERM is a shutdown.
set -u

readonly HOST_KEY=/etc/ssh/ssh_host_ed25519_key
readonly STATE=/var/lib/labctl
# labctl/agent/host/paths.py checks for this file.
readonly GOING_DOWN=/run/going-down
readonly DOCKERD_LOG=/var/log/dockerd.log
readonly HERE=/usr/local/lib/lab-server

say() { echo "lab-server: $*"; }

# The key is created first, because the provider waits for it to pin it.
prepare_ssh() {
  if [ ! -s "$HOST_KEY.pub" ]; then
    rm -f "$HOST_KEY" "$HOST_KEY.pub"
    ssh-keygen -q -t ed25519 -N '' -C '' -f "$HOST_KEY"
  fi
  install -d -m 0755 /run/sshd
  local keys=/home/student/.ssh/authorized_keys
  if [ ! -e "$keys" ]; then
    install -d -m 0700 -o student -g student "${keys%/*}"
    printf '%s\n' "${LABCTL_AUTHORIZED_KEY:-}" | install -m 0600 -o student -g student /dev/stdin "$keys"
  fi
}

# Docker mounts /proc/sys read-only, but an engine has to enable forwarding.
prepare_sysctl() {
  [ -w /proc/sys/net/ipv4/ip_forward ] || mount -o remount,bind,rw /proc/sys
}

# A container shares the host's boot id, so a restart of this server would not show as a reboot.
renew_boot_id() {
  cat /proc/sys/kernel/random/uuid > /run/boot_id
  chmod 0444 /run/boot_id
  mount --bind /run/boot_id /proc/sys/kernel/random/boot_id
}

# cgroup v2: a cgroup with processes cannot hand controllers to its children, so everything here
# moves into a child first (docker:dind does the same). cgroup v1: the host's tree is mounted, and
# containers are put below this server's own cgroup, so that its limits apply to them.
prepare_cgroups() {
  local root=/sys/fs/cgroup
  CGROUP_PARENT=
  if [ -e "$root/cgroup.controllers" ]; then
    [ -w "$root/cgroup.procs" ] || mount -o remount,rw "$root" || mount -o remount,bind,rw "$root"
    mkdir -p "$root/init"
    local tries=0
    until sed -e 's/ / +/g' -e 's/^/+/' "$root/cgroup.controllers" > "$root/cgroup.subtree_control"
    do
      [ $((tries += 1)) -le 20 ] || { say "cannot enable cgroup controllers"; break; }
      xargs -rn1 < "$root/cgroup.procs" > "$root/init/cgroup.procs" || :
    done 2>/dev/null
  else
    CGROUP_PARENT=$(sed -n 's/^[0-9]*:memory://p' /proc/self/cgroup)
  fi
}

# Kernels without nf_tables need the older iptables.
prepare_iptables() {
  iptables --table nat --list --numeric >/dev/null 2>&1 && return
  update-alternatives --quiet --set iptables /usr/sbin/iptables-legacy
  update-alternatives --quiet --set ip6tables /usr/sbin/ip6tables-legacy
}

keep_dockerd() {
  local code
  while :; do
    # No dockerd runs now, but another process may have its old pid.
    rm -f /run/docker.pid
    dockerd ${CGROUP_PARENT:+--cgroup-parent "$CGROUP_PARENT"} >> "$DOCKERD_LOG" 2>&1
    code=$?
    say "dockerd exited with code $code; restarting it. Log: $DOCKERD_LOG"
    tail -n 5 "$DOCKERD_LOG"
    sleep 0.5
  done
}

keep_sshd() {
  local code
  rm -f "$GOING_DOWN"
  while :; do
    /usr/sbin/sshd -D -e
    code=$?
    say "sshd exited with code $code; restarting it"
    sleep 0.5
  done
}

wait_for_dockerd() {
  local until_s=$((SECONDS + 60))
  until docker version >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$until_s" ] || { say "dockerd does not answer"; return 1; }
    sleep 0.1
  done
}

# /var/lib/docker may be from a server that ended without cleaning up.
first_boot() {
  "$HERE/clear.sh" >/dev/null
  if [ -s "$STATE/first-boot" ]; then
    say "running the first-boot script"
    bash "$STATE/first-boot" > /var/log/first-boot.log 2>&1 ||
      say "the first-boot script failed with exit code $?. Log: /var/log/first-boot.log"
  fi
  touch "$STATE/booted"
}

# Containers get SIGTERM and ten seconds, as in any machine's shutdown: with live-restore alone they
# would be killed together with this container's processes.
shut_down() {
  say "shutting down"
  touch "$GOING_DOWN"
  kill "${KEEPERS[@]}" 2>/dev/null
  docker ps --quiet | timeout 18 xargs -r docker stop --time 10 >/dev/null
  local pid
  if pid=$(cat /run/docker.pid 2>/dev/null) && kill "$pid" 2>/dev/null; then
    timeout 5 tail --pid="$pid" --sleep-interval=0.1 -f /dev/null || kill -KILL "$pid" 2>/dev/null
  fi
  exit 0
}

# Restarts a watchdog that was armed before a restart (labctl/agent/watchdog/install.py).
start_watchdog() {
  [ ! -x "$STATE/watchdog/start" ] || setsid "$STATE/watchdog/start" &
}

# An image built FROM this one may source these functions for its own boot.
[ "${BASH_SOURCE[0]}" = "$0" ] || return 0

KEEPERS=()
prepare_ssh
prepare_sysctl
renew_boot_id
prepare_cgroups
prepare_iptables
trap shut_down TERM INT
keep_dockerd & KEEPERS+=("$!")
# sshd starts last: after a login the engine is ready, or its failure can be examined.
wait_for_dockerd && [ ! -e "$STATE/booted" ] && first_boot
start_watchdog
keep_sshd & KEEPERS+=("$!")
say "ready"
while :; do wait; done
