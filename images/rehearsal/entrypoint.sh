#!/bin/bash
# The boot of a rehearsal's machine. An init (docker run --init) above it reaps orphans.
#
# The order is systemd's on an Ubuntu machine: cloud-init's local and network stages (boothooks,
# host keys, users) run before sshd, its config and final stages (runcmd, scripts) in parallel with
# it, and the engine starts meanwhile. /rehearsal/machine is this machine's directory on the host,
# read-only: seed/ (user-data and meta-data), ingress (its security groups) and imds.sock.
#
# Exit code 0 is a power-off, 75 requests a reboot.
set -u

readonly MACHINE=/rehearsal/machine
readonly OWN=/usr/local/lib/rehearsal
readonly REBOOT=75

# shellcheck source=../lab-server/entrypoint.sh
source /usr/local/lib/lab-server/entrypoint.sh

say() { echo "[$(cut -d' ' -f1 /proc/uptime)] rehearsal: $*"; }

prepare_cloud_init() {
  install -d -m 0755 /run/cloud-init /var/lib/cloud/seed
  # A machine that booted before has its instance data there; the seed may have changed since.
  ln -sfn "$MACHINE/seed" /var/lib/cloud/seed/nocloud
}

# Makes every AWS SDK on the machine use this cloud instead of the real one.
prepare_aws() {
  local home
  for home in /root /home/*; do
    [ -e "$home/.aws/config" ] && continue
    install -d -m 0755 "$home/.aws"
    printf '[default]\nendpoint_url = http://127.0.0.1:%s\n' "$REHEARSAL_API_PORT" \
      > "$home/.aws/config"
  done
}

prepare_network() {
  ip address add 169.254.169.254/32 dev lo
  "$OWN/forward.py" &
  "$OWN/ingress.sh"
}

# Ends with the exit code for a power-off or a reboot. The mark in /run is new in each container start.
end() {
  local code=0
  [ -e /run/rehearsal-reboot ] && code=$REBOOT
  KEEPERS+=("$@")
  # The lab server's shut_down exits with 0, hence the subshell.
  (shut_down)
  exit "$code"
}

KEEPERS=()
trap end TERM INT
install -d -m 0755 /run/sshd
case ${REHEARSAL_BOOT:-cloud-init} in
  sshd)
    "$OWN/ingress.sh"
    "$OWN/seed.py"
    ;;
  cloud-init)
    prepare_network
    prepare_aws
    prepare_cloud_init
    prepare_sysctl
    renew_boot_id
    prepare_cgroups
    prepare_iptables
    keep_dockerd & KEEPERS+=("$!")
    "$OWN/stages.py" & stages=$!
    # Wait for the network stage, as ssh.service is ordered after cloud-init.service.
    until [ -e /run/rehearsal-network-stage ] || ! kill -0 "$stages" 2>/dev/null; do
      sleep 0.02
    done
    ;;
esac
[ -s "$HOST_KEY" ] || ssh-keygen -q -t ed25519 -N '' -C '' -f "$HOST_KEY"
keep_sshd & KEEPERS+=("$!")
say "sshd is starting"
while :; do wait; done
