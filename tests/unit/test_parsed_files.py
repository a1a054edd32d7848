"""The parsed form of lab.yaml, kept so that a short command need not import PyYAML."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from labctl.config import LabConfig, load_lab, parsed_files
from labctl.config.document import Node, parse
from labctl.config.parsed_files import parse_or_recall
from labctl.errors import ConfigError, Problem

TEXT = b"lab: digits\nrun: [python, train.py]\nserver: {provider: local, gpu: }\n"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The texts that were parsed, rather than recalled."""
    texts: list[bytes] = []

    def count(data: bytes, origin: str, problems: list[Problem]) -> Node | None:
        texts.append(data)
        return parse(data, origin, problems)

    monkeypatch.setattr(parsed_files, "parse", count)
    return texts


def read(cache: Path, data: bytes = TEXT, origin: str = "lab.yaml") -> Node | None:
    return parse_or_recall(data, origin, [], cache)


def kept(cache: Path) -> Path:
    (file,) = (cache / "parsed").iterdir()
    return file


def test_the_same_bytes_are_parsed_once(tmp_path: Path, parsed: list[bytes]) -> None:
    first = read(tmp_path)
    assert read(tmp_path) == first == parse(TEXT, "lab.yaml", [])
    assert parsed == [TEXT]
    assert kept(tmp_path).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("data", "origin"), [(TEXT + b"# note\n", "lab.yaml"), (TEXT, "~/config.yaml")]
)
def test_other_bytes_or_another_origin_are_parsed(
    tmp_path: Path, parsed: list[bytes], data: bytes, origin: str
) -> None:
    read(tmp_path)
    assert read(tmp_path, data, origin) == parse(data, origin, [])
    assert parsed == [TEXT, data]


def other_text(file: Path) -> None:
    """The checksum in the name is the same, the bytes are not."""
    file.write_bytes(file.read_bytes().replace(b"digits", b"spirit"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(os.urandom(100)),
        lambda file: file.write_bytes(file.read_bytes()[:-5]),
        other_text,
        lambda file: file.write_bytes(b"\x91" * 100_000),
    ],
    ids=["empty", "random", "cut", "other-text", "deep"],
)
def test_a_damaged_file_is_parsed_again(
    tmp_path: Path, parsed: list[bytes], damage: Callable[[Path], object]
) -> None:
    read(tmp_path)
    damage(kept(tmp_path))
    assert read(tmp_path) == parse(TEXT, "lab.yaml", [])
    assert parsed == [TEXT, TEXT]


def test_a_later_version_parses_again(
    tmp_path: Path, parsed: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    read(tmp_path)
    monkeypatch.setattr(parsed_files, "VERSION", parsed_files.VERSION + 1)
    read(tmp_path)
    assert parsed == [TEXT, TEXT]


def test_a_file_with_problems_is_not_kept(tmp_path: Path) -> None:
    for _ in range(2):
        problems: list[Problem] = []
        parse_or_recall(b"lab: a\nlab: b\n", "lab.yaml", problems, tmp_path)
        assert len(problems) == 1
    assert not (tmp_path / "parsed").exists()


def test_a_cache_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    assert read(tmp_path / "cache") == parse(TEXT, "lab.yaml", [])


def load(root: Path, text: bytes) -> LabConfig:
    (root / "lab.yaml").write_bytes(text)
    return load_lab(root, environ={"HOME": str(root / "home")})


def test_an_edited_lab_yaml_counts_at_once(tmp_path: Path, parsed: list[bytes]) -> None:
    assert load(tmp_path, TEXT).name == "digits"
    assert load(tmp_path, TEXT).name == "digits"
    assert parsed == [TEXT]
    assert load(tmp_path, TEXT.replace(b"digits", b"letters")).name == "letters"
    with pytest.raises(ConfigError):
        load(tmp_path, TEXT + b"no-such-key: 1\n")
    with pytest.raises(ConfigError) as caught:  # recalled, and refused all the same
        load(tmp_path, TEXT + b"no-such-key: 1\n")
    assert caught.value.problems[0].line == 4
