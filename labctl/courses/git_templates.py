"""Read the files of a git commit, without a checkout: no hook, filter or submodule runs.

Git is a process of its own, with a limit for the size of what it fetches. A commit names its
contents, so it is fetched only once.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import msgspec

from labctl.config import copy_environment
from labctl.config.document import escape, quote
from labctl.config.identity import write_private
from labctl.decoding import decode_json
from labctl.sync.starter import StarterFile, find_size_problem

# bytes of the largest file that git may write, which is the pack with the commit
MOST_PACK_BYTES = 256 * 1024**2
# bytes of the list of a commit's files. Directories that share their contents can make it endless.
MOST_LISTING_BYTES = 8 * 1024**2
FETCH_S = 300.0
SHOWN_CHARACTERS = 300
# Runs git with a limit for the size of each file that it writes. Python ignores the signal that
# ends a process at the limit, and git would go on without it.
LIMITED = (
    "import os, resource, signal, sys\n"
    "signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"
    "most = int(sys.argv[1])\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)
SETTINGS = (
    "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "gc.auto=0",
    "-c", "maintenance.auto=false", "-c", "submodule.recurse=false",
    "-c", "fetch.recurseSubmodules=no",
    # One pack instead of a file for each object, so that MOST_PACK_BYTES limits all of them.
    "-c", "fetch.unpackLimit=1",
)  # fmt: skip
LINK, SUBMODULE, EXECUTABLE = "120000", "160000", "100755"


def is_fetched(address: str, commit: str, cache: Path) -> bool:
    """Whether `read_commit` needs no network."""
    return _cache_file(address, commit, cache).is_file()


def read_commit(address: str, commit: str, cache: Path) -> list[StarterFile]:
    """Return the files of a commit, fetched from `address` if they are not in `cache`.

    ValueError if it cannot be fetched, or holds links, submodules or too much.
    """
    stored = _cache_file(address, commit, cache)
    try:
        return decode_json(stored.read_bytes(), list[StarterFile])
    except (FileNotFoundError, msgspec.MsgspecError):
        pass
    if shutil.which("git") is None:
        raise ValueError("git is not installed on this machine: sudo apt install git")
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        _run_git(repository, ["init", "-q", "--bare", "."])
        _fetch(repository, address, commit)
        files = _read_tree(repository, commit)
    write_private(stored, msgspec.json.encode(files))
    return files


def _cache_file(address: str, commit: str, cache: Path) -> Path:
    return cache / f"{sha256(address.encode()).hexdigest()[:16]}-{commit}.json"


def _fetch(repository: Path, address: str, commit: str) -> None:
    """Fetch one commit; from a server that serves no single commits, all branches and tags."""
    words = ["fetch", "-q", "--no-tags", "--no-recurse-submodules"]
    try:
        _run_git(repository, [*words, "--depth=1", "--", address, commit])
    except ValueError as error:
        try:
            _run_git(repository, [*words, "--", address, "+refs/*:refs/fetched/*"])
            _run_git(repository, ["cat-file", "-e", f"{commit}^{{commit}}"])
        except ValueError:
            raise ValueError(
                f"the commit {commit[:10]} cannot be fetched from {escape(address)}: {error}"
            ) from None


def _read_tree(repository: Path, commit: str) -> list[StarterFile]:
    words = ["ls-tree", "-r", "-z", "-l", "--full-tree", commit]
    try:
        listing = _run_git(repository, words, most_bytes=MOST_LISTING_BYTES)
    except ValueError as error:
        raise ValueError(f"the commit {commit[:10]} cannot be listed: {error}") from None
    rows = [row.partition(b"\t") for row in listing.split(b"\0") if row]
    entries = []
    for head, _, name in rows:
        mode, _, blob, size = head.decode().split()
        try:
            path = name.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{name!a}: the path is not UTF-8") from None
        if mode in (LINK, SUBMODULE):
            kind = "a link; links" if mode == LINK else "a submodule; submodules"
            raise ValueError(f"{quote(path)} is {kind} are not handed out")
        entries.append((path, blob, int(size), mode == EXECUTABLE))
    problem = find_size_problem(len(entries), sum(size for _, _, size, _ in entries))
    if problem:
        raise ValueError(f"the commit {commit[:10]} has {problem}")
    return [
        StarterFile(
            path=path,
            content=_run_git(repository, ["cat-file", "blob", blob]),
            executable=executable,
        )
        for path, blob, _, executable in entries
    ]


def _run_git(repository: Path, words: Sequence[str], *, most_bytes: int = 0) -> bytes:
    """Run git in `repository` and return its output.

    ValueError with git's last line if it fails, or if its output or a file has more than
    `most_bytes`; 0 for MOST_PACK_BYTES.
    """
    most_bytes = most_bytes or MOST_PACK_BYTES
    environment = {
        "GIT_SSH_COMMAND": "ssh -o BatchMode=yes",
        **copy_environment(),
        "GIT_TERMINAL_PROMPT": "0",
        # An editor's or desktop's program would ask for a password in a window.
        "GIT_ASKPASS": "",
        "GIT_ALLOW_PROTOCOL": "https:ssh:file",
        "GIT_NO_LAZY_FETCH": "1",
        "LC_ALL": "C",
    }
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"):
        environment.pop(name, None)
    limited = (sys.executable, "-I", "-S", "-c", LIMITED, str(most_bytes))
    # The limit holds for the output too, because it is a file.
    with tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(
                [*limited, "git", *SETTINGS, *words],
                cwd=repository,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                timeout=FETCH_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"git did not finish within {FETCH_S:g} s") from None
        if done.returncode != 0:
            text = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
            if done.returncode == -signal.SIGXFSZ:
                text = f"more than {most_bytes // 1024**2} MiB"
            raise ValueError(f"git: {escape(text.splitlines()[-1][-SHOWN_CHARACTERS:])}")
        output.seek(0)
        return output.read()
