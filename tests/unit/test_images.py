"""An image's tag follows exactly what goes into it."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.runs.images import content_hash, list_copied_files


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    directory = tmp_path / "lab"
    for name in (
        "requirements.txt", "requirements-gpu.txt", "train.py", "src/a.py", "src/deep/b.py",
        ".git/HEAD", ".labctl/lab.json",
    ):  # fmt: skip
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)
    (directory / "link.txt").symlink_to("/etc/passwd")
    return directory


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("COPY requirements.txt .", {"requirements.txt"}),
        ("copy ./requirements.txt /x/", {"requirements.txt"}),
        ("COPY req*.txt /x/", {"requirements.txt", "requirements-gpu.txt"}),
        ("COPY src /src", {"src/a.py", "src/deep/b.py"}),
        ("COPY src/ train.py /x/", {"src/a.py", "src/deep/b.py", "train.py"}),
        ("ADD --chown=1:1 train.py /x/", {"train.py"}),
        ('COPY ["train.py", "/x/"]', {"train.py"}),
        ("COPY src \\\n  /src", {"src/a.py", "src/deep/b.py"}),
        ("COPY --from=build /out /out", set()),
        ("COPY link.txt /x/", set()),
        ("ONBUILD COPY train.py /x", {"train.py"}),
        ("RUN --mount=type=cache,target=/c pip install x", set()),
        ("COPY <<EOF /x", set()),
        ("RUN cp train.py /x", set()),
        ("# COPY train.py /x", set()),
        ("ADD https://example.org/x.tar /x/", set()),
    ],
)
def test_what_a_line_takes_in(lab: Path, line: str, expected: set[str]) -> None:
    found = list_copied_files(lab, f"FROM base\n{line}\n")
    assert {str(path.relative_to(lab)) for path in found} == expected


@pytest.mark.parametrize(
    "line",
    [
        "COPY . /x",
        "COPY ./ /x",
        "ADD $WHAT /x",
        'COPY ["the requirements.txt", "/x"]',
        "COPY missing.txt /x",
        "RUN --mount=type=bind,target=/x pip install -r /x/requirements.txt",
        "RUN --mount=source=train.py,target=/x python /x",
    ],
)
def test_everything_but_links_and_our_own(lab: Path, line: str) -> None:
    names = {str(path.relative_to(lab)) for path in list_copied_files(lab, line)}
    assert names == {
        "requirements.txt", "requirements-gpu.txt", "train.py", "src/a.py", "src/deep/b.py"
    }  # fmt: skip


def test_a_lab_below_a_hidden_directory_counts_as_any_other(tmp_path: Path) -> None:
    lab = tmp_path / ".labctl" / "lab"
    lab.mkdir(parents=True)
    (lab / "a.txt").touch()
    assert list_copied_files(lab, "COPY a.txt /") == {lab / "a.txt"}


def test_the_tag_changes_with_what_is_copied_and_with_nothing_else(lab: Path) -> None:
    (lab / "Dockerfile").write_text("FROM base\nCOPY requirements.txt /x/\nCOPY src /src\n")
    first = content_hash(lab, {"A": "1", "B": "2"})
    assert content_hash(lab, {"B": "2", "A": "1"}) == first
    (lab / "train.py").write_text("changed")
    (lab / "src" / "a.py").touch()
    assert content_hash(lab, {"A": "1", "B": "2"}) == first
    seen = {first, content_hash(lab, {"A": "1"})}
    (lab / "src" / "deep" / "b.py").write_text("changed")
    seen.add(content_hash(lab, {"A": "1", "B": "2"}))
    (lab / "src" / "deep" / "b.py").rename(lab / "src" / "b.py")
    seen.add(content_hash(lab, {"A": "1", "B": "2"}))
    (lab / "src" / "new.py").touch()
    seen.add(content_hash(lab, {"A": "1", "B": "2"}))
    (lab / "Dockerfile").write_text("FROM other\nCOPY requirements.txt /x/\nCOPY src /src\n")
    seen.add(content_hash(lab, {"A": "1", "B": "2"}))
    (lab / "src" / "new.py").chmod(0o755)
    seen.add(content_hash(lab, {"A": "1", "B": "2"}))
    (lab / ".dockerignore").write_text("src/new.py\n")
    seen.add(content_hash(lab, {"A": "1", "B": "2"}))
    assert len(seen) == 8
