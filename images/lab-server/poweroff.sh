#!/bin/sh
# poweroff, and `shutdown ... now`: the server's own shutdown, which the entrypoint does at SIGTERM.
case ${0##*/} in
  shutdown)
    for word; do
      case $word in now | +0) now=yes ;; esac
    done
    [ -n "$now" ] || { echo "shutdown: only \"shutdown now\" is known here" >&2; exit 1; } ;;
esac
[ "$(id -u)" = 0 ] || { echo "${0##*/}: only root may do this" >&2; exit 1; }
exec kill -TERM 1
