"""Read the files of a template: one of labctl's, a directory of the course, or a git commit.

Every function raises ValueError with the reason if the files cannot be handed out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from labctl.config.document import quote
from labctl.config.locations import parse_git_address
from labctl.courses import git_templates
from labctl.lazy import lazy_imports
from labctl.lifecycle.sample_project import CPU_BASE, CUDA_BASE, SKIPPED
from labctl.sync.ignore import NEVER_ANYWHERE, Ignore, find_rule, read_rules
from labctl.sync.starter import MOST_BYTES, StarterFile, find_files_problem, find_size_problem
from labctl.wire.containment import is_inside

with lazy_imports(__name__):
    import jinja2

# The directories of each template of labctl; a file of a later one replaces that of an earlier one.
BUILT_IN = {
    "image-classifier": ("image-classifier",),
    "image-classifier-starter": ("image-classifier", "image-classifier-starter"),
}
LAB_TEMPLATE = Path("course") / "starter-lab.yaml.j2"


def read_template(
    template: str,
    root: Path,
    templates: Path,
    cache: Path,
    *,
    image: str = "",
    has_gpus: bool = True,
) -> tuple[StarterFile, ...]:
    """Read the template of an assignment of the course at `root`, by path.

    `templates` holds those of labctl. A commit is fetched only once, into `cache`. `image` is the
    course's, which labctl's own templates use.
    """
    if git := parse_git_address(template):
        files = git_templates.read_commit(*git, cache)
    elif template in BUILT_IN and not (root / template).is_dir():
        files = _read_built_in(template, templates, image, has_gpus)
    elif not (root / template).is_dir():
        names = ", ".join(BUILT_IN)
        raise ValueError(
            f"there is no directory {quote(template)} here, and no template of that name in "
            f"labctl: {names}"
        )
    else:
        files = read_directory(root, template)
    if not files:
        raise ValueError(f"{quote(template)} has no files")
    if problem := find_files_problem(files):
        raise ValueError(f"{quote(template)} has {problem}")
    return tuple(sorted(files, key=lambda file: file.path))


def read_directory(root: Path, name: str) -> list[StarterFile]:
    """Read a directory below `root`, without what its .gitignore and .labignore leave out.

    Sizes are checked before any file is read.
    """
    directory = root / name
    if not directory.is_dir():
        raise ValueError(f"there is no directory {quote(name)}")
    if not is_inside(directory, root):
        raise ValueError(f"{quote(name)} leads out of the course's folder through a link")
    entries = list(_walk(directory, "", ()))
    problem = find_size_problem(len(entries), sum(status.st_size for _, status in entries))
    if problem:
        raise ValueError(f"{quote(name)} has {problem}")
    return [_read_file(directory, path, status) for path, status in entries]


def _walk(directory: Path, prefix: str, ignore: Ignore) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path and the status of each regular file; ValueError for anything else."""
    try:
        with os.scandir(directory / prefix) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    except OSError as error:
        raise ValueError(f"{prefix or directory.name} cannot be read: {error.strerror}") from None
    rules = read_rules(directory, prefix, [entry.name for entry in entries]).rules
    ignore = (*ignore, (prefix, rules))
    for entry in entries:
        path = prefix + entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name in NEVER_ANYWHERE or find_rule(ignore, path, is_folder=is_folder):
            continue
        if entry.is_symlink():
            raise ValueError(f"{quote(path)} is a link; links are not handed out")
        if is_folder:
            yield from _walk(directory, f"{path}/", ignore)
            continue
        status = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{quote(path)} is a special file; these are not handed out")
        yield path, status


def _read_file(directory: Path, path: str, status: os.stat_result) -> StarterFile:
    try:
        descriptor = os.open(directory / path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{quote(path)} cannot be read: {error.strerror}") from None
    return StarterFile(path=path, content=content, executable=bool(status.st_mode & 0o100))


def _read_built_in(name: str, templates: Path, image: str, has_gpus: bool) -> list[StarterFile]:
    """Read one of labctl's templates, with a lab.yaml for the course's image and servers."""
    files: dict[str, StarterFile] = {}
    for directory in BUILT_IN[name]:
        files |= {file.path: file for file in read_directory(templates, directory)}
    kept = [
        file
        for path, file in files.items()
        if not path.endswith(".j2") and SKIPPED.isdisjoint(path.split("/"))
    ]
    source = (templates / LAB_TEMPLATE).read_text(encoding="utf-8")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    text = environment.from_string(source).render(
        image=image, base_image=CUDA_BASE if has_gpus else CPU_BASE
    )
    return [*kept, StarterFile(path="lab.yaml", content=text.encode())]
