"""What labctl says to rsync and how it reads what rsync says, as values."""

from __future__ import annotations

import pytest

from labctl.commands import rsync
from labctl.transports.rsync import find_program

SAMBA = """rsync  version 3.2.7  protocol version 31
Checksum list:
    xxh128 xxh3 xxh64 (xxhash) md5 md4 none
Compress list:
    zstd lz4 zlibx zlib none
Usage: rsync [OPTION]... SRC [SRC]... DEST
--times, -t              preserve modification times
--perms, -p              preserve permissions
--inplace                update destination files in-place
--ignore-times, -I       don't skip files that match size and time
--timeout=SECONDS        set I/O timeout in seconds
--compare-dest=DIR       also compare destination files relative to DIR
--files-from=FILE        read list of source-file names from FILE
--from0, -0              all *-from/filter files are delimited by 0s
--secluded-args, -s      use the protocol to safely send the args
--chmod=CHMOD            affect file and/or directory permissions
--info=FLAGS             fine-grained informational verbosity
--stats                  give some file-transfer stats
"""
FULL = rsync.parse_program(SAMBA)
OPENRSYNC = "openrsync: protocol version 29\nusage: openrsync [--files-from=FILE] [--times]"


def test_a_program_is_what_it_says_of_itself() -> None:
    assert FULL.is_usable
    assert FULL.compressions == {"zstd", "lz4", "zlibx", "zlib", "none"}
    assert rsync.parse_program(SAMBA.partition("Usage")[0]).compressions == FULL.compressions
    assert not rsync.parse_program(OPENRSYNC).is_usable
    assert not rsync.RsyncProgram().is_usable


def test_an_older_one_goes_without_what_it_lacks() -> None:
    lines = (line for line in SAMBA.splitlines() if "--info" not in line and "-s " not in line)
    older = rsync.parse_program("\n".join(lines))
    assert older.is_usable
    assert older.can_name("/home/student/labctl")
    assert not older.can_name("/home/my student")
    assert FULL.can_name("/home/my student")
    argv = rsync.transfer_argv(older, transfer())
    assert not [word for word in argv if word in ("-s", "--info=progress2")]


def transfer(**more: str) -> rsync.Transfer:
    return rsync.Transfer(shell_words=("ssh", "-T"), source="/here/", target="srv:/there/", **more)


def test_a_transfer_names_what_it_sends_and_takes_no_links() -> None:
    argv = rsync.transfer_argv(FULL, transfer())
    assert {"--files-from=-", "--from0", "--no-links", "--inplace", "--ignore-times", "-s"} <= {
        *argv
    }
    assert argv[-4:] == ["ssh -T", "--", "/here/", "srv:/there/"]
    assert not [word for word in argv if word.startswith(("--compress", "--compare-dest"))]
    more = rsync.transfer_argv(FULL, transfer(basis="/live", compression="zstd"))
    assert {"--compare-dest=/live", "--compress-choice=zstd"} <= {*more}


@pytest.mark.parametrize(
    ("word", "text"),
    [("plain", "plain"), ("with space", "'with space'"), ("it's", "'it''s'"), ('a"b', "'a\"b'")],
)
def test_a_quote_in_a_word_of_the_shell_is_doubled(word: str, text: str) -> None:
    assert rsync.shell_text(["ssh", word]) == f"ssh {text}"


def test_names_are_never_options_or_comments() -> None:
    assert rsync.name_list(["#a", "-b", "ü"]) == "./#a\0./-b\0./ü\0".encode()


@pytest.mark.parametrize(
    ("line", "done"),
    [
        ("     50,000,003 100%  267.89MB/s    0:00:00 (xfr#2, to-chk=0/3)", 50_000_003),
        ("              3   0%    0.00kB/s    0:00:00  ", 3),
        ("Total file size: 3 bytes", None),
        ("", None),
    ],
)
def test_progress_is_read(line: str, done: int | None) -> None:
    assert rsync.parse_progress(line) == done


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("complete: 2000287 epoch 3/model.pt", "epoch 3/model.pt"),
        (r"complete: 45 \#303\#251 \#134#101 \x\#012y", "é \\#101 \\x\ny"),
        ("Total file size: 3 bytes", None),
    ],
)
def test_a_complete_file_is_read(line: str, path: str | None) -> None:
    assert rsync.parse_complete_file(line) == path


def test_what_had_to_travel_is_read() -> None:
    assert rsync.parse_sent_bytes("x\nLiteral data: 1,011 bytes\nMatched data: 5 bytes\n") == 1011
    assert rsync.parse_sent_bytes("nothing of the kind") == 0


def test_the_rsync_of_this_machine_is_usable() -> None:
    assert find_program().is_usable
