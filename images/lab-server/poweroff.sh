#!/bin/sh
# poweroff, and `shutdown ... now`: sends SIGTERM to the entrypoint, which shuts the server down.
case ${0##*/} in
  shutdown)
    for word; do
      case $word in now | +0) now=yes ;; esac
    done
    [ -n "$now" ] || { echo "shutdown: this server supports only \"shutdown now\"" >&2; exit 1; } ;;
esac
[ "$(id -u)" = 0 ] || { echo "${0##*/}: must be root" >&2; exit 1; }
exec kill -TERM 1
