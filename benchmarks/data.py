"""Files to a server and back: labctl push and pull compared with rsync, scp and the peers' SFTP.

Hashes prove arrival.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import shlex
import shutil
import time
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec

from benchmarks.boxes import Box, Boxes, boxes
from benchmarks.control import PEER_WORK, Asked
from benchmarks.measure import Call, Comparison, NotDoneError, Row
from benchmarks.peers import Peer
from benchmarks.settings import Settings
from benchmarks.slow_link import slow_link
from benchmarks.startup import LABCTL
from labctl import Lab
from labctl.model import Run

FILE_BYTES = 4096
CHANGED = 10
AGE_S = 7200.0
FIRST_TARGET, AGAIN_TARGET, BIG_TARGET, SLOW_TARGET = 1.05, 1.0, 0.65, 1.05
PULL_TARGET = 1.0  # with its check on the disk, which rsync does not do
SHARDS = 8
FAST, SLOW = "fast link", "100 Mbit per s"
SLOW_BYTES_PER_S = 12.5e6  # 100 Mbit/s
BLOCK_BYTES = 1024 * 1024
LAB_CODE = "labctl/{lab}/code/files"
LAB_DATA = "labctl/{lab}/data/big"


def make_files(folder: Path, count: int) -> None:
    """Write different files of FILE_BYTES; their random bytes are not compressible."""
    folder.mkdir(parents=True)
    for number in range(count):
        _write(folder / f"file-{number:05}", time.time() - AGE_S)


def _write(path: Path, at: float) -> None:
    """Write new content with the time `at`: rsync skips files of the same size and second."""
    path.write_bytes(os.urandom(FILE_BYTES))
    os.utime(path, (at, at))


def make_big(path: Path, mib: int) -> None:
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        for _ in range(mib):
            file.write(os.urandom(BLOCK_BYTES))


def digest(folder: Path) -> str:
    """Return one hash of all names and contents directly in `folder`, like `remote_digest`."""
    sums = []
    for path in sorted(folder.iterdir(), key=lambda one: one.name.encode()):
        with path.open("rb") as file:
            sums.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  ./{path.name}\n")
    return hashlib.sha256("".join(sums).encode()).hexdigest()


def remote_digest(box: Box, folder: str) -> str:
    line = "find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"
    return box.sh(f"cd {folder} && {line}").split()[0]


def arrived(box: Box, source: Path, folder: str) -> Callable[[int], None]:
    def check(number: int) -> None:
        if remote_digest(box, folder) != digest(source):
            raise NotDoneError(f"the files in {folder} differ from those sent")

    return check


class Sides:
    """Rows that each send a tree of their own from this machine to `box`."""

    def __init__(self, made: Boxes, box: Box) -> None:
        self.made, self.box = made, box
        self.rsync_shell = " ".join(made.ssh("default"))
        self.same_shell = " ".join(made.ssh("labctl's ciphers"))
        self.hosts = Asked("data", made, [box]).hosts

    def row(
        self,
        name: str,
        argv: tuple[str, ...],
        source: Path,
        folder: str,
        target: float | None = None,
    ) -> Row:
        row = Row(name, Call(argv, self.made.home, self.made.home), target)
        row.after = arrived(self.box, source, folder)
        return row

    def rsync(self, name: str, shell: str, source: Path, folder: str) -> Row:
        words = ("rsync", "-a", "-e", shell, f"{source}/", f"{self.box.name}:{folder}/")
        return self.row(name, words, source, folder)

    def scp(self, source: Path, folder: str) -> Row:
        words = ("scp", "-q", "-r", "-F", self.made.config("default"), str(source))
        return self.row("scp -r", (*words, f"{self.box.name}:{folder}"), source, folder)

    def sftp(self, peer: Peer, source: Path, folder: str) -> Row:
        words = (peer.program("python"), PEER_WORK, peer.package, "put", self.hosts)
        name = f"{peer.package} {peer.version}, sftp"
        return self.row(name, (*words, str(source), folder), source, folder)

    def push(self, lab: Lab, source: Path, folder: str, target: float | None) -> Row:
        words = (LABCTL, "-C", str(lab.config.root), "push", "--yes")
        row = self.row("labctl push", words, source, folder, target)
        row.ours = True
        return row


def compare(settings: Settings) -> Generator[Comparison]:
    """Compare pushes and pulls of one server; the baseline is rsync."""
    sizes = settings.sizes
    with boxes(settings.home / "data", 1, settings.image) as made:
        box = made.all[0]
        steps: tuple[Callable[[], Comparison], ...] = (
            # first: after many files were removed, ext4 makes new ones slower
            lambda: first_push(made, box, settings),
            lambda: push_again(made, box, sizes.files, sizes.rounds),
            lambda: big_file(made, box, sizes.big_mib, sizes.few),
            lambda: pull_big(made, box, sizes.big_mib, 1, sizes.few),
            lambda: pull_big(made, box, sizes.big_mib, SHARDS, sizes.few),
            lambda: text(made, box, sizes.big_mib // 4, FAST, sizes.few),
        )
        for make_comparison in steps:
            yield make_comparison()
            clear(made, box)
        with slow_link(made, box, SLOW_BYTES_PER_S) as (behind, slow_box):
            yield text(behind, slow_box, sizes.big_mib // 4, SLOW, sizes.few)


def first_push(made: Boxes, box: Box, settings: Settings) -> Comparison:
    """Measure a first push: at the start of a round the server and labctl's index are empty.

    What came before is put aside, not removed: for minutes after many files were, ext4 makes new
    ones several times slower, and it would be luck on which side that falls.
    """
    sides = Sides(made, box)
    lab = made.lab("first", box)
    source = lab.config.root / "files"
    make_files(source, settings.sizes.files)
    code = LAB_CODE.format(lab="first")
    rows = [
        sides.rsync("rsync -a", sides.rsync_shell, source, "first-rsync"),
        sides.rsync("rsync -a, labctl's ciphers", sides.same_shell, source, "first-same"),
        sides.push(lab, source, code, FIRST_TARGET),
    ]
    rows += [sides.scp(source, "first-scp")]
    if settings.slow_peers:
        for name in ("asyncssh", "fabric"):
            if peer := settings.peers.get(name):
                rows.append(sides.sftp(peer, source, f"first-{name}"))

    def empty(number: int) -> None:
        box.sh("aside=$(mktemp -d aside.XXXXXX) && mv first-* labctl/first $aside 2>/dev/null || :")
        (lab.config.root / ".labctl" / "index.json").unlink(missing_ok=True)

    for row in rows:
        row.before = empty
    return Comparison(
        f"{settings.sizes.files} files of 4 KiB, first push", rows, settings.sizes.few
    )


def push_again(made: Boxes, box: Box, count: int, rounds: int) -> Comparison:
    """Measure a push after ten files have changed since the last round."""
    sides = Sides(made, box)
    lab = made.lab("again", box)
    sources = {"labctl": lab.config.root / "files"}
    for name in ("rsync", "same", "master"):
        sources[name] = made.home / f"again-{name}" / "files"
    for source in sources.values():
        make_files(source, count)
    master = f"{sides.same_shell} -o ControlMaster=auto -o ControlPersist=600"
    master += f" -o ControlPath={made.home}/rs-%C"
    code = LAB_CODE.format(lab="again")
    rows = [
        sides.rsync("rsync -a", sides.rsync_shell, sources["rsync"], "again-rsync"),
        sides.rsync("rsync -a, labctl's ciphers", sides.same_shell, sources["same"], "again-same"),
        sides.rsync("rsync -a, over a master", master, sources["master"], "again-master"),
        sides.push(lab, sources["labctl"], code, AGAIN_TARGET),
    ]
    changing = (sources[name] for name in ("rsync", "same", "master", "labctl"))
    for row, source in zip(rows, changing, strict=True):
        row.before = functools.partial(_change, source)
    return Comparison(f"{count} files of 4 KiB, {CHANGED} changed", rows, rounds)


def _change(source: Path, number: int) -> None:
    paths = sorted(source.iterdir())
    for path in paths[number % 7 :: len(paths) // CHANGED]:
        _write(path, time.time() - AGE_S / 2 + number)


def big_file(made: Boxes, box: Box, mib: int, rounds: int) -> Comparison:
    """Measure a push of one new file."""
    sides = Sides(made, box)
    lab = made.lab("big", box, "data: {big: ./big}\n")
    source = lab.config.root / "big"
    make_big(source / "big.bin", mib)
    rows = [
        sides.rsync("rsync -a", sides.rsync_shell, source, "big-rsync"),
        sides.rsync("rsync -a, labctl's ciphers", sides.same_shell, source, "big-same"),
        sides.push(lab, source, LAB_DATA.format(lab="big"), BIG_TARGET),
        sides.scp(source, "big-scp"),
    ]

    def empty(number: int) -> None:
        box.sh("rm -rf big-* labctl/big")
        (lab.config.root / ".labctl" / "index.json").unlink(missing_ok=True)

    for row in rows:
        row.before = empty
    return Comparison(f"one file of {mib} MiB", rows, rounds)


def pull_big(made: Boxes, box: Box, mib: int, files: int, rounds: int) -> Comparison:
    """Measure a pull of a checkpoint of so many files, which are not on this machine before.

    Together they have `mib` MiB.
    """
    title = f"one file of {mib} MiB" if files == 1 else f"{files} files of {mib // files} MiB"
    lab = made.lab(f"home{files}", box)
    run = f"labctl/home{files}/runs/big"
    ended = Run(id="big", lab_id=lab.id, server_id=box.name, state="exited", exit_code=0)
    lab.context.state.save_run(ended)
    outputs, record = '{"outputs": ["checkpoints"]}', msgspec.json.encode(ended).decode()
    box.sh(
        f"mkdir -p {run}/.labctl {run}/checkpoints/step && cd {run} && "
        f"echo {shlex.quote(outputs)} > .labctl/spec.json && "
        f"echo {shlex.quote(record)} > .labctl/record.json && "
        f"for part in $(seq {files}); do"
        f" head -c {mib // files}M /dev/urandom > checkpoints/step/model-$part.bin; done"
    )
    there, here = f"{run}/checkpoints/step", made.home / f"home{files}-rsync"
    pulled = lab.config.root / "runs" / "big"

    def row(name: str, into: Path, *words: str, target: float | None = None) -> Row:
        one = Row(name, Call(words, made.home, made.home), target)
        one.after = _came_home(box, there, into)
        return one

    def rsync(name: str, algorithms: str) -> Row:
        shell = " ".join(made.ssh(algorithms))
        return row(name, here, "rsync", "-a", "-e", shell, f"{box.name}:{there}/", f"{here}/")

    pull = (LABCTL, "-C", str(lab.config.root), "pull", "big")
    rows = [
        rsync("rsync -a", "default"),
        rsync("rsync -a, labctl's ciphers", "labctl's ciphers"),
        row("labctl pull", pulled / "checkpoints" / "step", *pull, target=PULL_TARGET),
    ]

    def empty(number: int) -> None:
        box.sh(f"rm -f {run}/.labctl/hashes.json")
        for folder in (here, pulled):
            shutil.rmtree(folder, ignore_errors=True)

    for one in rows:
        one.before = empty
    return Comparison(f"{title}, pulled", rows, rounds)


def _came_home(box: Box, there: str, here: Path) -> Callable[[int], None]:
    def check(number: int) -> None:
        if remote_digest(box, there) != digest(here):
            raise NotDoneError(f"the files in {here} differ from those on the server")

    return check


def text(made: Boxes, box: Box, mib: int, link: str, rounds: int) -> Comparison:
    """Measure a push of text that compresses to a third, with the time that compression takes.

    On a slow `link` the baseline is `rsync -az`.
    """
    sides = Sides(made, box)
    lab = made.lab("text", box, "data: {text: ./text}\n")
    source = lab.config.root / "text"
    source.mkdir()
    draw = random.Random(7)
    with (source / "rows.csv").open("w") as file:
        while file.tell() < mib * BLOCK_BYTES:
            file.writelines(f"{draw.random():.6f},{draw.randrange(100)}\n" for _ in range(10_000))
    plain = sides.rsync("rsync -a", sides.rsync_shell, source, "text-rsync")
    packed = sides.row(
        "rsync -az",
        ("rsync", "-az", "-e", sides.rsync_shell, f"{source}/", f"{box.name}:text-packed/"),
        source,
        "text-packed",
    )
    is_slow = link != FAST
    target = SLOW_TARGET if is_slow else None
    rows = [packed] if is_slow else [plain, packed]
    rows.append(sides.push(lab, source, "labctl/text/data/text", target))

    def empty(number: int) -> None:
        box.sh("rm -rf text-* labctl/text")
        (lab.config.root / ".labctl" / "index.json").unlink(missing_ok=True)

    for row in rows:
        row.before = empty
    return Comparison(f"a CSV of {mib} MiB, {link}", rows, rounds)


def clear(made: Boxes, box: Box) -> None:
    """Delete files here and on the server before the next measurement."""
    box.sh("rm -rf aside.* first-* again-* big-* text-* labctl")
    homes = tuple(f"home{files}{side}" for files in (1, SHARDS) for side in ("", "-rsync"))
    labs = ("first", "again", "big", "text", *homes)
    for name in (*labs, "again-rsync", "again-same", "again-master"):
        shutil.rmtree(made.home / name, ignore_errors=True)
