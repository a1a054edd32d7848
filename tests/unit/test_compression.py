"""What is worth compressing on its way."""

from __future__ import annotations

import os
from pathlib import Path

from labctl.sync.compression import LEAST_BYTES, SAMPLE_BYTES, SAMPLES, _spread, is_compressible

MIB = 1024**2
ROWS = b"".join(f"{number},{number * number % 97},0.125\n".encode() for number in range(60_000))


def made(folder: Path, name: str, content: bytes) -> tuple[Path, int]:
    path = folder / name
    path.write_bytes(content)
    return path, len(content)


def test_text_is_and_noise_is_not(tmp_path: Path) -> None:
    rows = made(tmp_path, "rows.csv", ROWS)
    noise = made(tmp_path, "noise.bin", os.urandom(4 * MIB))
    assert is_compressible([rows])
    assert not is_compressible([noise])
    assert not is_compressible([noise, rows]), "a fifth that shrinks does not carry the rest"


def test_many_small_files_are_sampled_like_one(tmp_path: Path) -> None:
    small = [
        made(tmp_path, f"{n}.py", b"def step(batch):\n    return 1\n" * 40) for n in range(200)
    ]
    assert sum(size for _, size in small) > LEAST_BYTES
    assert is_compressible(small)


def test_little_empty_and_vanished_files_are_left_as_they_are(tmp_path: Path) -> None:
    assert not is_compressible([])
    assert not is_compressible([made(tmp_path, "a", b"x" * 100), made(tmp_path, "b", b"")])
    assert not is_compressible([(tmp_path / "gone", 8 * MIB)])


def test_what_is_read_stays_small_whatever_there_is() -> None:
    huge = [(Path(f"/{n}"), 700 * MIB) for n in range(10)]
    pieces = _spread(huge, 7000 * MIB)
    assert SAMPLES <= len(pieces) <= SAMPLES + 1
    assert {path for path, _ in pieces} == {path for path, _ in huge}
    assert all(0 <= offset < 700 * MIB for _, offset in pieces)
    tiny = [(Path(f"/{n}"), 100) for n in range(10_000)]
    assert len(_spread(tiny, 1_000_000)) <= 1_000_000 // SAMPLE_BYTES + 1
