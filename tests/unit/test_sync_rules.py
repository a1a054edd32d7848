"""What counts as the lab's code: ignore rules as git reads them, names, links, the index."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from labctl.errors import NotFoundError, UsageError
from labctl.events import Event, Note, SilentReporter
from labctl.sync.ignore import find_ignored_name, find_rule, parse_rules, rule_text
from labctl.sync.scan import (
    LARGE_BYTES,
    MANY_FILES,
    HashIndex,
    hash_file,
    rehash,
    scan_code,
    scan_data,
)


class Notes(SilentReporter):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, Note):
            self.texts.append(event.text)


def put(root: Path, name: str, text: str = "x") -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def names(root: Path, **options: list[Path]) -> list[str]:
    return [f.path for f in scan_code(root, SilentReporter(), **options)]


def test_ignore_files_count_and_the_nearest_one_wins(tmp_path: Path) -> None:
    put(tmp_path, ".gitignore", "*.log\nbuild/\n")
    put(tmp_path, ".labignore", "big.bin\n!keep.log\n")
    put(tmp_path, "sub/.gitignore", "!again.log\n/only-here\n")
    for name in ("a.log", "keep.log", "big.bin", "build/x", "sub/again.log", "sub/only-here"):
        put(tmp_path, name)
    put(tmp_path, "sub/deep/only-here")
    assert names(tmp_path) == [
        ".gitignore",
        ".labignore",
        "keep.log",
        "sub/.gitignore",
        "sub/again.log",
        "sub/deep/only-here",
    ]


def test_what_lies_in_an_ignored_tree_can_be_kept_by_name(tmp_path: Path) -> None:
    put(tmp_path, ".gitignore", "cache/**\n!cache/.keep\n")
    put(tmp_path, "cache/.keep")
    put(tmp_path, "cache/sub/x")
    assert names(tmp_path) == [".gitignore", "cache/.keep"]


def test_a_later_rule_for_a_directory_does_not_bring_back_its_files(tmp_path: Path) -> None:
    put(tmp_path, ".gitignore", "a\na/b\n!a/\n")
    put(tmp_path, "a/b")
    put(tmp_path, "a/c")
    assert names(tmp_path) == [".gitignore", "a/c"]


def test_own_directories_and_data_are_never_code(tmp_path: Path) -> None:
    for name in (
        ".git/x",
        ".labctl/x",
        "runs/r1/x",
        "server-edits/x",
        ".venv/x",
        "a/__pycache__/x",
    ):
        put(tmp_path, name)
    put(tmp_path, "dataset/1.png")
    put(tmp_path, "src/runs/kept.py")
    assert names(tmp_path, data=[tmp_path / "dataset"]) == ["src/runs/kept.py"]


def test_data_is_taken_whole_whatever_ignore_files_say(tmp_path: Path) -> None:
    lab, data = tmp_path / "lab", tmp_path / "data"
    lab.mkdir()
    for name in (".gitignore", "a.log", "runs/x", ".git/x"):
        put(data, name, "*\n")
    found = scan_data(lab, "digits", data, SilentReporter())
    assert [f.path for f in found] == [".git/x", ".gitignore", "a.log", "runs/x"]


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="digits"):
        scan_data(tmp_path, "digits", tmp_path / "nowhere", SilentReporter())


def test_links_are_told_and_never_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    put(outside, "secret")
    lab = tmp_path / "lab"
    put(lab, "real.py")
    (lab / "dir").symlink_to(outside)
    (lab / "file").symlink_to(outside / "secret")
    (lab / "round").symlink_to(lab)
    told = Notes()
    assert [f.path for f in scan_code(lab, told)] == ["real.py"]
    assert told.texts == ["skipped symbolic links: dir, file, round"]


def test_an_environment_of_packages_is_left_out_whatever_its_name(tmp_path: Path) -> None:
    for name in ("train.py", "myenv/pyvenv.cfg", "myenv/lib/a.py", "tools/c/conda-meta/history"):
        put(tmp_path, name)
    put(tmp_path, "tools/b.py")
    notes = Notes()
    assert [f.path for f in scan_code(tmp_path, notes)] == ["tools/b.py", "train.py"]
    assert notes.texts == ["skipped environments of packages: myenv, tools/c"]


def test_control_characters_are_refused_and_shown_escaped(tmp_path: Path) -> None:
    put(tmp_path, "a\x1b[2Jb")
    with pytest.raises(UsageError, match=r"a\\x1b\[2Jb"):
        names(tmp_path)
    put(tmp_path, ".labignore", "a*\n")
    assert names(tmp_path) == [".labignore"]


def test_names_that_are_not_utf8_are_left_out_and_told(tmp_path: Path) -> None:
    put(tmp_path, os.fsdecode(b"caf\xe9"))
    put(tmp_path, "café")
    told = Notes()
    assert [f.path for f in scan_code(tmp_path, told)] == ["café"]
    assert told.texts == [r"skipped files whose names are not UTF-8: caf\udce9"]


def test_a_line_that_is_no_rule_is_told_and_the_others_count(tmp_path: Path) -> None:
    put(tmp_path, ".gitignore", "!\n*.log\n")
    put(tmp_path, "a.log")
    told = Notes()
    assert [f.path for f in scan_code(tmp_path, told)] == [".gitignore"]
    assert told.texts == ["skipped invalid ignore rules: .gitignore: !"]


def age(path: Path, by_s: float = 60.0) -> None:
    old = time.time() - by_s
    os.utime(path, (old, old))


def test_an_unchanged_file_is_not_read_again(tmp_path: Path) -> None:
    path = put(tmp_path, "a.bin", "one")
    age(path)
    first = scan_code(tmp_path, SilentReporter())
    found = path.stat()
    index = HashIndex(tmp_path, "code")
    assert index.lookup("a.bin", found) == first[0].sha256 == hash_file(path)
    # Same size and time, but another content: only ctime tells, and it does.
    path.write_text("two")
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert scan_code(tmp_path, SilentReporter())[0].sha256 == hash_file(path) != first[0].sha256


def test_a_file_written_just_now_is_not_cached(tmp_path: Path) -> None:
    path = put(tmp_path, "a.bin", "one")
    scan_code(tmp_path, SilentReporter())
    assert HashIndex(tmp_path, "code").lookup("a.bin", path.stat()) == ""


@pytest.mark.parametrize("broken", [b"", b"{", b"[]", b'{"code":{"a.bin":[1]}}', b"\xff"])
def test_a_broken_index_is_made_anew(tmp_path: Path, broken: bytes) -> None:
    path = put(tmp_path, "a.bin", "one")
    age(path)
    put(tmp_path, ".labctl/index.json").write_bytes(broken)
    assert scan_code(tmp_path, SilentReporter())[0].sha256 == hash_file(path)
    assert HashIndex(tmp_path, "code").lookup("a.bin", path.stat()) == hash_file(path)


def test_refresh_reads_the_changed_and_drops_the_gone(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        put(tmp_path, name, name)
    before = scan_code(tmp_path, SilentReporter())
    put(tmp_path, "a", "changed")
    put(tmp_path, "b", "changed too, but nobody asked")
    (tmp_path / "c").unlink()
    after = rehash(tmp_path, before, {"a", "c"}, SilentReporter(), None)
    assert [f.path for f in after] == ["a", "b"]
    assert after[0].sha256 == hash_file(tmp_path / "a")
    assert after[1] == before[1]


def sized(root: Path, name: str, size: int) -> Path:
    with put(root, name, "").open("r+b") as file:
        file.truncate(size)
    age(root / name)
    return root / name


def test_only_a_large_file_that_is_not_known_waits_for_its_hash(tmp_path: Path) -> None:
    known = sized(tmp_path, "known", 1)
    assert scan_code(tmp_path, SilentReporter())[0].sha256 == hash_file(known)
    sized(tmp_path, "small", LARGE_BYTES - 1)
    sized(tmp_path, "large", LARGE_BYTES)
    index = HashIndex(tmp_path, "code")
    _, large, small = scan_code(tmp_path, SilentReporter(), later=index)
    assert (large.sha256, small.sha256) == ("", hash_file(tmp_path / "small"))
    (large,) = rehash(tmp_path, [large], {"large"}, SilentReporter(), index)
    index.save()
    assert large.sha256 == hash_file(tmp_path / "large")
    assert scan_code(tmp_path, SilentReporter(), later=HashIndex(tmp_path, "code"))[1:] == (
        large,
        small,
    )


@pytest.mark.parametrize("much", ["files", "bytes"])
def test_a_first_scan_of_much_leaves_every_hash_to_the_push(tmp_path: Path, much: str) -> None:
    count, size = (MANY_FILES, 1) if much == "files" else (2, LARGE_BYTES // 2)
    for number in range(count - 1):
        sized(tmp_path, f"file{number}", size)
    few = scan_code(tmp_path, SilentReporter(), later=HashIndex(tmp_path, "code"))
    assert all(entry.sha256 for entry in few)
    (tmp_path / ".labctl" / "index.json").unlink()
    sized(tmp_path, "last", size)
    found = scan_code(tmp_path, SilentReporter(), later=HashIndex(tmp_path, "code"))
    assert [entry.sha256 for entry in found] == [""] * count
    assert all(entry.sha256 for entry in scan_code(tmp_path, SilentReporter()))


@pytest.mark.parametrize("section", ["code", "data/set"])
def test_whoever_does_not_push_gets_every_hash(tmp_path: Path, section: str) -> None:
    with put(tmp_path, "large", "").open("r+b") as file:
        file.truncate(LARGE_BYTES)
    if section == "code":
        (entry,) = scan_code(tmp_path, SilentReporter())
    else:
        (entry,) = scan_data(tmp_path, "set", tmp_path, SilentReporter())
    assert entry.sha256 == hash_file(tmp_path / "large")


# git reads `.**/` otherwise than its manual: it compares the part before the first wildcard by
# itself, and then finds `**/` at the start of the rest. So `**` is only a word of its own.
WORD = st.text(alphabet="ab*?.", min_size=1, max_size=4).filter(
    lambda w: w not in (".", "..") and "**" not in w
)
RULE = st.builds(
    lambda sign, front, words, back: sign + front + "/".join(words) + back,
    st.sampled_from(["", "", "!"]),
    st.sampled_from(["", "/"]),
    st.lists(st.one_of(WORD, st.just("**")), min_size=1, max_size=3),
    st.sampled_from(["", "/"]),
)
NAME = st.text(alphabet="ab.", min_size=1, max_size=3).filter(lambda w: w.strip("."))
PATH = st.lists(NAME, min_size=1, max_size=3).map("/".join)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(top=st.lists(RULE, max_size=4), deeper=st.lists(RULE, max_size=2), asked=st.lists(PATH))
def test_rules_mean_what_git_says_they_mean(
    tmp_path_factory: pytest.TempPathFactory, top: list[str], deeper: list[str], asked: list[str]
) -> None:
    root = tmp_path_factory.mktemp("repo")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    put(root, ".gitignore", "".join(f"{r}\n" for r in top))
    put(root, "a/.gitignore", "".join(f"{r}\n" for r in deeper))
    for path in asked:
        if not any((root / p).is_file() for p in parents(path)) and not (root / path).is_dir():
            put(root, path)
    argv = ["git", "-C", str(root), "ls-files", "--others", "--exclude-standard", "-z"]
    said = subprocess.run(argv, capture_output=True, check=True).stdout.decode()
    assert names(root) == sorted(said.split("\0")[:-1])


def parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


@given(st.lists(st.text(max_size=12), max_size=5), PATH)
def test_no_text_in_an_ignore_file_breaks_the_scan(lines: list[str], name: str) -> None:
    rules, invalid = parse_rules(lines)
    assert set(invalid) <= {f".gitignore: {line}" for line in lines}
    rule = find_rule((("", rules),), name, is_folder=False)
    assert rule is None or rule.excludes


def test_the_rule_that_leaves_a_file_out_is_found_with_its_file(tmp_path: Path) -> None:
    put(tmp_path, ".gitignore", "*.bin\n/data/raw/\n")
    put(tmp_path, ".labignore", "!keep.bin\n")
    put(tmp_path, "data/.gitignore", "# none\n*.txt\n")
    for name in ("data/train.bin", "data/keep.bin", "data/raw/a/b.png", "data/input.txt"):
        put(tmp_path, name)

    def find(name: str) -> tuple[str, str] | None:
        ignored = find_ignored_name(tmp_path, name)
        return None if ignored is None else (ignored.name, rule_text(ignored.rule))

    assert find("data/train.bin") == ("data/train.bin", "*.bin in .gitignore")
    assert find("data/raw/a/b.png") == ("data/raw", "/data/raw/ in .gitignore")
    assert find("data/input.txt") == ("data/input.txt", "*.txt in data/.gitignore")
    assert find("data/keep.bin") is None
    assert find("missing/x.png") is None
