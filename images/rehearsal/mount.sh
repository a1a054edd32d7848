#!/bin/sh
# mount, with support for a disk that was attached to this machine: a directory that has the name of
# a block device. With -o ro it is mounted read-only.
device=
for word in "$@"; do
  case $(readlink -f -- "$word" 2>/dev/null) in
    /var/lib/rehearsal/disks/*) [ -n "$device" ] || device=$word ;;
  esac
  last=$word
done
[ -n "$device" ] || exec /usr/bin/mount "$@"
/usr/bin/mount --bind "$(readlink -f -- "$device")" "$last" || exit
case " $* " in
  *" -r "* | *" --read-only "* | *" -o ro"* | *",ro "* | *",ro,"*)
    exec /usr/bin/mount -o remount,bind,ro "$last" ;;
esac
