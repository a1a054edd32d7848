"""An archive is believed only where every reader finds the same files in it."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forged_bed import (
    FORGED,
    TAR_NAMES,
    central,
    end,
    end64,
    framed,
    local,
    locator,
    model,
    parts,
    plain,
    tar_named,
)

from labctl.wire.archives import ArchiveError, is_archive, read_directory
from labctl.wire.judge import FileVerdict, judge_file

BOTO = {"boto3", "botocore", "mypy_boto3_s3"}
PICKLE = b"\x80\x02}."
FILES = model(PICKLE)


def names(data: bytes) -> list[str]:
    return [member.name.decode() for member in read_directory(io.BytesIO(data), len(data))]


def judged(data: bytes, path: str = "model/m.pt") -> FileVerdict:
    return judge_file(path, io.BytesIO(data), len(data))


def zipped(method: int = zipfile.ZIP_DEFLATED, **files: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


class Pipe(io.RawIOBase):
    """A sink that cannot seek, so that sizes follow the data."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, block: Any) -> int:
        self.data += block
        return len(block)


def streamed(force_zip64: bool) -> bytes:
    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("a", "w", force_zip64=force_zip64) as file:
            file.write(b"hello" * 100)
        with archive.open("b", "w", force_zip64=force_zip64) as file:
            file.write(b"")
    return bytes(pipe.data)


def commented() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a", b"1")
        archive.comment = b"made on a Monday"
    return out.getvalue()


HONEST: dict[str, Callable[[], bytes]] = {
    "stored": lambda: zipped(zipfile.ZIP_STORED, a=b"1", b=b""),
    "deflated": lambda: zipped(a=b"1" * 1000, b=os.urandom(50)),
    "empty": lambda: zipped(),
    "by hand": lambda: plain(FILES),
    "sizes behind the data": lambda: streamed(False),
    "long sizes behind the data": lambda: streamed(True),
    "a comment": commented,
    "no ASCII": lambda: zipped(**{"größe.txt": b"1"}),
}


@pytest.mark.parametrize("kind", HONEST)
def test_what_honest_writers_do_passes(kind: str) -> None:
    data = HONEST[kind]()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert len(names(data)) == len(archive.namelist())
    assert judged(data, "logs/a.zip").hazard == ""


@pytest.mark.skipif(shutil.which("zip") is None, reason="there is no zip on this machine")
@pytest.mark.parametrize("words", [["-r"], ["-r", "-0"], ["-r", "-fz"], ["-r", "-fd"]])
def test_archives_of_the_zip_command_pass(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "größe.txt").write_text("hello " * 100)
    (tmp_path / "small").write_bytes(b"1")
    subprocess.run(["zip", "-q", *words, "a.zip", "folder", "small"], cwd=tmp_path, check=True)
    data = (tmp_path / "a.zip").read_bytes()
    assert len(names(data)) == 3


def save_new(torch: Any, into: Path) -> None:
    torch.save({"weight": torch.ones(100, 3), "größe": torch.zeros(2)}, into)


def save_old(torch: Any, into: Path) -> None:
    torch.save({"weight": torch.ones(3)}, into, _use_new_zipfile_serialization=False)


@pytest.mark.train
def test_files_of_pytorch_safetensors_and_numpy_pass(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    numpy = importlib.import_module("numpy")
    save_file = importlib.import_module("safetensors.torch").save_file
    save_new(torch, tmp_path / "new.pt")
    with (tmp_path / "stream.pt").open("wb") as file:
        save_new(torch, file)  # type: ignore[arg-type]
    save_old(torch, tmp_path / "old.pt")
    numpy.savez(tmp_path / "a.npz", x=numpy.arange(5), y=numpy.ones(3))
    numpy.savez_compressed(tmp_path / "b.npz", x=numpy.arange(5000))
    save_file({"weight": torch.ones(3)}, tmp_path / "m.safetensors")
    for path in tmp_path.iterdir():
        verdict = judged(path.read_bytes(), path.name)
        assert verdict.hazard == "", path
        assert bool(verdict.pickle) == (path.suffix == ".pt"), path


@pytest.mark.train
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_read_and_named_as_the_program_that_it_is(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "m.pt")
    data = (tmp_path / "m.pt").read_bytes()
    assert "m/data.pkl" in names(data)
    assert "__torch__" in judged(data).hazard


def pytorch_2_4(*, offset_in_extra: bool = False) -> bytes:
    """As PyTorch 2.4 writes: padded to 64 bytes, sums and sizes behind the data, zip64 records."""
    body, directory = b"", b""
    for name, data in FILES.items():
        entry = central(name, data, len(body))
        flags = struct.pack("<H", 0x0808)
        directory += entry[:8] + flags + entry[10:]
        # From 4 GiB on, the header of a file says where it is, and nothing of its size.
        long = struct.pack("<2HQ", 1, 8, len(body)) if offset_in_extra else b""
        fill = -(len(body) + 30 + len(name) + len(long) + 4) % 64
        extra = long + b"FB" + struct.pack("<H", fill) + b"Z" * fill
        head = struct.pack("<4s5H3L2H", b"PK\x03\x04", 0, 0x0808, 0, 0, 0, 0, 0, 0, len(name),
                           len(extra))  # fmt: skip
        body += head + name.encode() + extra + data
        body += b"PK\x07\x08" + entry[16:28]
    records = end64(len(FILES), len(directory), len(body)) + locator(len(body) + len(directory))
    return body + directory + records + end(len(FILES), len(directory), len(body))


@pytest.mark.parametrize("offset_in_extra", [False, True])
def test_what_pytorch_2_4_wrote_passes(offset_in_extra: bool) -> None:
    data = pytorch_2_4(offset_in_extra=offset_in_extra)
    assert sorted(names(data)) == sorted(FILES)
    assert judged(data) == FileVerdict("an archive of pickles, as torch.save writes it", "")


def changed(data: bytes, mark: bytes, offset: int, value: bytes, last: bool = False) -> bytes:
    """`data` with other bytes behind the first (last) `mark`."""
    at = (data.rindex(mark) if last else data.index(mark)) + offset
    return data[:at] + value + data[at + len(value) :]


def moved(files: dict[str, bytes], before: bytes = b"", between: bytes = b"") -> bytes:
    """An archive behind `before`, with `between` in front of its directory; offsets are right."""
    body, directory = parts(files, len(before))
    place = len(before) + len(body) + len(between)
    return before + body + between + directory + end(len(files), len(directory), place)


def doubled(first: str, second: str) -> bytes:
    body = local(first, b"1") + local(second, b"2")
    directory = central(first, b"1", 0) + central(second, b"2", len(local(first, b"1")))
    return body + directory + end(2, len(directory), len(body))


def two_directories() -> bytes:
    """Two whole archives, one behind the other, and the end record of the first one's directory."""
    return plain(FILES) + plain(FILES)


LOCAL, CENTRAL, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
GOOD = plain(FILES)
HOSTILE: dict[str, Callable[[], bytes]] = {
    "prepended, offsets not moved": lambda: LOCAL + bytes(60) + GOOD,
    "prepended, offsets moved": lambda: moved(FILES, LOCAL + bytes(60)),
    "a picture in front": lambda: b"GIF89a" + GOOD,
    "two archives": two_directories,
    "a gap before the directory": lambda: moved(FILES, b"", b"hidden"),
    "a gap before the end": lambda: GOOD[:-22] + b"hidden" + GOOD[-22:],
    "bytes behind the end": lambda: GOOD + b"hidden",
    "an end record in the comment": lambda: GOOD[:-2] + b"\x16\0" + GOOD[-22:],
    "part of one in the comment": lambda: GOOD[:-2] + b"\x04\0" + END,
    "an end record before the end": lambda: GOOD[:-22] + GOOD[-22:] + GOOD[-22:],
    "the same name twice": lambda: doubled("m/data.pkl", "m/data.pkl"),
    "the same name in capitals": lambda: doubled("m/data.pkl", "m/DATA.PKL"),
    "another name in the header": lambda: changed(GOOD, b"m/data.pkl", 2, b"DATA"),
    "another method": lambda: changed(GOOD, LOCAL, 8, b"\x08"),
    "another sum": lambda: changed(GOOD, LOCAL, 14, b"\1\2\3\4"),
    "another size": lambda: changed(GOOD, LOCAL, 22, b"\x01"),
    "another packed size": lambda: changed(GOOD, LOCAL, 18, b"\x01"),
    "no size, and none behind the data": lambda: changed(GOOD, LOCAL, 14, bytes(12)),
    "other flags": lambda: changed(GOOD, LOCAL, 6, b"\x08"),
    "encrypted": lambda: changed(changed(GOOD, LOCAL, 6, b"\1"), CENTRAL, 8, b"\1"),
    "an unknown method": lambda: changed(changed(GOOD, LOCAL, 8, b"\x0e"), CENTRAL, 10, b"\x0e"),
    "a descriptor that differs": lambda: changed(pytorch_2_4(), b"PK\x07\x08", 8, b"\x63"),
    "a file that overlaps the next": lambda: changed(GOOD, CENTRAL, 42, b"\1", last=True),
    "a size beyond the end": lambda: changed(GOOD, CENTRAL, 20, b"\xff\xff\xff\x7f"),
    "a count that differs": lambda: changed(GOOD, END, 8, b"\2\0\2\0"),
    "several disks": lambda: changed(GOOD, END, 4, b"\1\0\1\0"),
    "zip64 that is missing": lambda: changed(GOOD, END, 16, b"\xff" * 4),
    "zip64 that contradicts": lambda: changed(pytorch_2_4(), END, 16, b"\1\0\0\0"),
    "zip64 elsewhere": lambda: changed(pytorch_2_4(), b"PK\x06\x07", 8, bytes(8)),
    "zip64 beyond every file": lambda: changed(pytorch_2_4(), b"PK\x06\x07", 8, b"\xff" * 8),
    "a count that is too large": lambda: changed(GOOD, END, 8, b"\4\0\4\0"),
    "zip64 with room in it": lambda: changed(pytorch_2_4(), b"PK\x06\x06", 4, b"\x40"),
    "a name with an end in it": lambda: doubled("m/data.pkl\0.txt", "m/b"),
    "cut off": lambda: GOOD[:-10],
    "nothing but a beginning": lambda: LOCAL,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_readers_may_take_differently_is_refused(kind: str) -> None:
    data = HOSTILE[kind]()
    assert data != GOOD
    assert is_archive(io.BytesIO(data), len(data))
    with pytest.raises(ArchiveError):
        read_directory(io.BytesIO(data), len(data))
    for path in ("model/m.pt", "model/m.safetensors", "logs/a.zip", "code/train.py"):
        assert "may not agree" in judged(data, path).hazard


@pytest.mark.parametrize("kind", FORGED)
def test_two_faces_are_two_faces(kind: str, tmp_path: Path) -> None:
    """Python's own reader shows the harmless one; test_forged_checkpoints.py loads the other."""
    data = FORGED[kind](tmp_path / "marker")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert b"posix" not in archive.read("m/data.pkl")
    assert b"posix" in data
    assert "may not agree" in judged(data).hazard


@pytest.mark.parametrize("kind", TAR_NAMES)
def test_a_tar_is_one_whatever_else_it_looks_like(kind: str, tmp_path: Path) -> None:
    data = tar_named(TAR_NAMES[kind], tmp_path / "marker")
    for path in ("model/m.pt", "model/m.npy", "model/m.safetensors", "model/m"):
        verdict = judged(data, path)
        assert verdict.pickle, path
        assert "torch.load reads as a pickle" in verdict.hazard, path


LOAD = """
import sys, torch
for path in sys.argv[2:]:
    try:
        torch.load(open(path, "rb", int(sys.argv[1])), weights_only=False)
    except Exception:
        pass
"""


def load_with_pytorch(*paths: Path, buffering: int = -1) -> None:
    words = [sys.executable, "-c", LOAD, str(buffering), *map(str, paths)]
    subprocess.run(words, capture_output=True, check=False)


@pytest.mark.long
@pytest.mark.train
def test_pytorch_would_run_what_lies_in_such_a_tar(tmp_path: Path) -> None:
    """Otherwise the test above would show nothing. One process, which imports PyTorch for long."""
    markers = {}
    for number, (kind, name) in enumerate(TAR_NAMES.items()):
        path = tmp_path / f"{number}.pt"
        markers[kind] = tmp_path / f"marker-{number}"
        path.write_bytes(tar_named(name, markers[kind]))
    load_with_pytorch(*sorted(tmp_path.glob("*.pt")))
    assert [kind for kind, marker in markers.items() if not marker.exists()] == []


def test_a_frame_ends_with_its_pickle(tmp_path: Path) -> None:
    data = framed(tmp_path / "marker")
    for path in ("m.pt", "m.bin", "m.safetensors"):
        assert "before its frame does" in judged(data, path).hazard
    for protocol in range(6):
        honest = pickle.dumps([1] * 50_000, protocol)
        assert not judged(honest + honest, "m.pkl").hazard


@pytest.mark.long
@pytest.mark.train
def test_pytorch_would_run_what_follows_such_a_frame(tmp_path: Path) -> None:
    """Otherwise the test above would show nothing."""
    model_path, marker = tmp_path / "m.pt", tmp_path / "marker"
    model_path.write_bytes(framed(marker))
    load_with_pytorch(model_path, buffering=0)
    assert marker.exists()


@pytest.mark.parametrize("folder", ["code", "CODE"])
def test_a_program_is_one_in_any_case(folder: str) -> None:
    """PyTorch looks names up without regard to case."""
    data = plain({**model(PICKLE), f"m/{folder}/__torch__.py": b"class M(Module): ..."})
    assert "TorchScript" in judged(data).hazard


def test_a_second_name_in_an_extra_field_is_refused() -> None:
    def with_name(name: bytes) -> bytes:
        extra = struct.pack("<2HB", 0x7075, 5 + len(name), 1) + bytes(4) + name
        body = local("m/a", b"1").replace(
            b"\3\0\0\0m/a", struct.pack("<2H", 3, len(extra)) + b"m/a" + extra
        )
        directory = central("m/a", b"1", 0)
        return body + directory + end(1, len(directory), len(body))

    assert names(with_name(b"m/a")) == ["m/a"]
    with pytest.raises(ArchiveError, match="second name"):
        names(with_name(b"m/data.pkl"))


def test_numbers_are_no_archive() -> None:
    noise = bytes(1000) + END + bytes(500)
    assert not is_archive(io.BytesIO(noise), len(noise))
    assert judged(noise, "model/m.safetensors") == FileVerdict()


def test_the_judge_runs_where_servers_have_python_3_8(tmp_path: Path) -> None:
    """What the oldest Python of a server cannot compile or import is found here."""
    import ast

    import labctl.wire

    folder = Path(labctl.wire.__file__).parent
    for path in folder.glob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 8))
        modules = {
            name.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for name in node.names
        }
        modules |= {
            (node.module or "").split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and not node.level
        }
        # Imported by the first request, where the server has it; the stubs only by mypy.
        modules -= BOTO if path.stem in ("s3", "s3_errors") else set()
        assert modules <= sys.stdlib_module_names, path
