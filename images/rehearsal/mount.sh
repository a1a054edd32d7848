#!/bin/sh
# mount, which also takes a disk that was attached to this machine: a directory, under the name
# that a block device would have. With -o ro it is read-only.
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
