"""rsync's command lines, for pulls. Pure: the process is run by `actions/rsync.py`.

It appends to what is already there (`--append` works in place), so that a cut
transfer goes on where it stopped. Nothing is trusted for that: whoever receives checks hashes
before a file gets its real name. Links are never carried.
"""

from __future__ import annotations

import re

from labctl.model import Value

OLDEST = (3, 0)
PACKS_WELL = (3, 2)
"""From here on two rsyncs agree on zstd or lz4. Older ones have zlib alone, too slow for a LAN."""
_VERSION = re.compile(r"rsync\s+version\s+v?(\d+)\.(\d+)")
_PROGRESS = re.compile(rb"\s*([0-9][0-9.,']*)\s+\d+%")


class Way(Value, frozen=True):
    """How bulk data reaches a server: what rsync takes after `-e`, and the name before the `:`.

    `version` is the local rsync's (major, minor).
    """

    ssh_line: str
    host: str
    version: tuple[int, int] = OLDEST


def parse_version(text: str) -> tuple[int, int]:
    """(major, minor) from `rsync --version`; (0, 0) where it is none, such as macOS's openrsync."""
    found = _VERSION.match(text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def pull_argv(
    way: Way, directory: str, partial: str, names_file: str, *, pack: bool = False
) -> list[str]:
    """Bring the named files, below `directory` there, into the local `partial`."""
    return [
        *_common(way, names_file, pack),
        "--",
        f"{way.host}:{directory}/",
        f"{partial.rstrip('/')}/",
    ]


def _common(way: Way, names_file: str, pack: bool) -> list[str]:
    argv = ["rsync", "--protect-args", f"--files-from={names_file}", "--from0"]
    # A file staged without its owner's write bit could not be appended to after a cut.
    argv += ["--append", "--no-links", "--no-devices", "--no-specials", "--chmod=Du+rwx,Fu+rw"]
    if way.version >= (3, 1):
        argv += ["--info=progress2,name0", "--no-human-readable", "--outbuf=N"]
    if pack and way.version >= PACKS_WELL:
        argv += ["--compress", "--compress-level=1"]
    return [*argv, "-e", way.ssh_line]


def parse_progress(segment: bytes) -> int | None:
    """Bytes so far from one piece of `--info=progress2`, which separates them by carriage returns.

    Digits may be grouped after the local custom.
    """
    found = _PROGRESS.match(segment)
    return int(re.sub(rb"\D", b"", found[1])) if found else None
