"""Paths of lab.yaml on this disk, the places of this machine, and the id of a lab."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import labctl.config
from labctl.config import LabConfig, check_files, ensure_lab_id, find_paths, load_lab, read_lab_id
from labctl.config.packages import read_packages
from labctl.errors import ConfigError, LabError, PolicyError, Problem


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "digits"
    root.mkdir()
    return root


def load(root: Path, text: str, **environ: str) -> LabConfig:
    (root / "lab.yaml").write_text(text)
    return load_lab(root, environ={"HOME": str(root.parent), **environ})


def file_problems(lab: LabConfig) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        check_files(lab)
    return list(caught.value.problems)


def test_what_is_there_passes(root: Path) -> None:
    (root / "set").mkdir()
    (root / "docker").mkdir()
    (root / "docker" / "Dockerfile").write_text("FROM scratch\n")
    outside = root.parent / "elsewhere"
    outside.mkdir()
    (root / "link").symlink_to("set")
    text = f"image: {{build: docker}}\ndata: {{a: set, b: {outside}, c: ~/elsewhere, d: link}}\n"
    check_files(load(root, text + "store: s3://bucket/x"))


def test_everything_missing_is_told_at_once_with_its_line(root: Path) -> None:
    (root / "file").write_text("x")
    (root / "empty").mkdir()
    lab = load(
        root,
        "data:\n  a: ./gone\n  b: /nowhere/at/all\n  c: file\nimage:\n  build: empty\n",
        LABCTL_WHEELHOUSE="/no/wheels",
    )
    found = file_problems(lab)
    assert [(each.path, each.line) for each in found] == [
        ("data.a", 2),
        ("data.b", 3),
        ("data.c", 4),
        ("image.build", 6),
        ("wheelhouse", 0),
    ]
    assert "no Dockerfile in 'empty'" in found[3].message
    assert "(from LABCTL_WHEELHOUSE)" in found[4].message


def test_links_out_of_the_lab_are_refused(root: Path) -> None:
    outside = root.parent / "private"
    outside.mkdir()
    (outside / "Dockerfile").write_text("FROM scratch\n")
    (root / "link").symlink_to(outside)
    (root / "deep").mkdir()
    (root / "deep" / "up").symlink_to("../../private")
    (root / "direct").mkdir()
    (root / "direct" / "Dockerfile").symlink_to(outside / "Dockerfile")
    lab = load(root, "data: {a: link, b: deep/up}\nimage: {build: link}\n")
    assert [each.path for each in file_problems(lab)] == ["data.a", "data.b", "image.build"]
    assert all("out of the lab" in each.message for each in file_problems(lab))
    lab = load(root, "image: {build: direct}\n")
    assert "out of the lab" in file_problems(lab)[0].message


def test_a_lab_reached_through_a_link_is_still_itself(root: Path) -> None:
    (root / "set").mkdir()
    (root / "lab.yaml").write_text("data: {a: set}")
    other = root.parent / "alias"
    other.symlink_to(root)
    check_files(load_lab(other, environ={"HOME": str(root.parent)}))


def test_loading_works_when_the_data_is_gone(root: Path) -> None:
    assert load(root, "data: {a: ./gone}").data["a"].path == root / "gone"


def test_the_id_is_made_once(root: Path) -> None:
    assert read_lab_id(root) == ""
    assert not (root / ".labctl").exists()
    made = ensure_lab_id(root)
    assert len(made) == 12
    assert int(made, 16) >= 0
    assert ensure_lab_id(root) == read_lab_id(root) == made
    assert json.loads((root / ".labctl" / "lab.json").read_text())["created_at"] > 0
    assert (root / ".labctl" / ".gitignore").read_text() == "*\n"
    assert sorted(path.name for path in (root / ".labctl").iterdir()) == [".gitignore", "lab.json"]


def test_many_at_once_get_the_same_id(root: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(lambda _: ensure_lab_id(root), range(64)))) == 1


def test_processes_at_once_get_the_same_id(root: Path) -> None:
    line = "import sys; from pathlib import Path; from labctl.config import ensure_lab_id;"
    line += "sys.stdin.readline(); print(ensure_lab_id(Path(sys.argv[1])))"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", line, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    said = {each.communicate("\n", timeout=240)[0].strip() for each in started}
    assert said == {read_lab_id(root)}


def test_an_id_damaged_at_any_byte_is_told_or_whole(root: Path) -> None:
    made = ensure_lab_id(root)
    file = root / ".labctl" / "lab.json"
    whole = file.read_bytes()
    for length in range(len(whole.rstrip())):
        file.write_bytes(whole[:length])
        with pytest.raises(LabError, match="is damaged"):
            ensure_lab_id(root)
    file.write_bytes(whole)
    assert ensure_lab_id(root) == made


@pytest.mark.parametrize("text", ['{"id": "../../etc"}', '{"id": "A"}', '{"id": 5}', "[]", "null"])
def test_an_id_that_is_none_is_refused(root: Path, text: str) -> None:
    (root / ".labctl").mkdir()
    (root / ".labctl" / "lab.json").write_text(text)
    with pytest.raises(LabError, match="is damaged"):
        ensure_lab_id(root)


def test_a_strangers_links_do_not_choose_where_we_write(root: Path) -> None:
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    (root / ".labctl").symlink_to(elsewhere)
    with pytest.raises(PolicyError, match="is a link to another place"):
        ensure_lab_id(root)
    assert list(elsewhere.iterdir()) == []


def test_the_places_of_this_machine(tmp_path: Path) -> None:
    home = str(tmp_path)
    found = find_paths({"HOME": home})
    assert found.state_dir == tmp_path / ".local/state/labctl"
    assert found.config_file == tmp_path / ".config/labctl/config.yaml"
    assert found.keys_dir == tmp_path / ".local/share/labctl/keys"
    assert found.ssh_dir == found.state_dir / "ssh"
    assert found.user_ssh_config == tmp_path / ".ssh/config"
    assert found.database.parent == found.state_dir
    assert not found.keys_dir.is_relative_to(found.state_dir)
    assert list(tmp_path.iterdir()) == []


def test_the_environment_moves_them(tmp_path: Path) -> None:
    environ = {
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": "/x/state",
        "XDG_CONFIG_HOME": "relative",
        "XDG_DATA_HOME": "",
    }
    found = find_paths(environ)
    assert found.state_dir == Path("/x/state/labctl")
    assert found.config_dir == tmp_path / ".config/labctl"
    assert found.keys_dir == tmp_path / ".local/share/labctl/keys"
    moved = find_paths({**environ, "LABCTL_STATE_DIR": "~/s"})
    assert moved.state_dir == tmp_path / "s"
    assert moved.keys_dir == found.keys_dir
    assert find_paths({**environ, "LABCTL_STATE_DIR": "here"}).state_dir == Path.cwd() / "here"


def test_the_packages_own_files_are_found() -> None:
    assert (labctl.config.find_data_dir() / "images").is_dir()


def test_every_public_name_loads() -> None:
    for name in labctl.config.__all__:
        assert getattr(labctl.config, name) is not None
    assert not hasattr(labctl.config, "nothing")


def test_the_light_names_do_not_load_the_heavy_ones() -> None:
    line = (
        "import sys; from labctl.config import find_paths, read_lab_id;"
        "from labctl.state import State;"
        "heavy = {'yaml', 'difflib', 'subprocess', 'labctl.config.lab', 'labctl.config.schema'};"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    environ = {**os.environ}
    said = subprocess.run(
        [sys.executable, "-c", line], capture_output=True, text=True, check=True, env=environ
    )
    assert said.stdout.strip() == ""


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("requirements.txt", "torch==2.8.0  # see -r other\n--index-url https://x.org\n", ""),
        ("requirements.txt", "-r base.txt\n-c https://x.org/c.txt\n--hash=sha256:0\n", ""),
        ("requirements.txt", "-cgone.txt\n", "and there is no file 'gone.txt' in the lab"),
        (
            "requirements.txt",
            "numpy\n-r ../base.txt\n",
            "line 2 of 'requirements.txt' reads '../",
        ),
        ("requirements.txt", "--requirement=/base.txt\n", "which is not in the lab; copy it there"),
        (
            "requirements.txt",
            "-r nested.txt\n",
            "line 1 of 'nested.txt' installs code outsi",
        ),
        ("requirements.txt", "-e .\n", "has neither a pyproject.toml nor a setup.py"),
        ("requirements.txt", "-e ./bird-lib[gpu]\n", ""),
        ("requirements.txt", "./bird-lib[a,b] ; python_version > '3'\n", ""),
        ("requirements.txt", "-e git+https://x.org/a.git#egg=a\na @ git+https://x.org/a\n", ""),
        (
            "requirements.txt",
            "./wheels/a.whl\n",
            "installs a file of this machine ('./wh",
        ),
        ("requirements.txt", "x @ file:///a\n", "installs code outside the lab ('x @ file:///a')"),
        ("requirements.txt", "--find-links wheels\n", "set LABCTL_WHEELHOUSE"),
        ("requirements.txt", "-f https://x.org/torch.html\n", ""),
        ("pyproject.toml", "[project]\nname = 'a'\ndependencies = ['torch']\n", ""),
        ("pyproject.toml", "[tool.poetry]\nname = 'a'\n", "has no [project] table"),
        ("pyproject.toml", "[tool.poetry]\nname = 'a'\n[build-system]\n", ""),
        ("pyproject.toml", "[tool.poetry]\npackage-mode = false\n[build-system]\n", "no [project]"),
        ("pyproject.toml", "[project]\ndynamic = ['dependencies']\n", ""),
        ("pyproject.toml", "[project\n", "is not valid"),
        ("pyproject.toml", "project = 'birds'\n", "Expected `object | null`, got `str`"),
        ("environment.yml", "dependencies:\n  - python=3.11\n  - pip: [torch]\n", ""),
        ("environment.yml", "dependencies:\n  - pip:\n    - -r base.txt\n", ""),
        ("environment.yml", "dependencies:\n  - pip:\n    - -r gone.txt\n", "line 3"),
        ("requirements.txt", "#" * 1024 * 1024 + "#", "at most 1 MiB"),
    ],
)
def test_what_an_image_cannot_install(root: Path, name: str, text: str, told: str) -> None:
    key = "conda" if name.endswith("yml") else "requirements"
    for path, other in (
        ("base.txt", "six\n-r base.txt\n"),
        ("nested.txt", "-e ../elsewhere\n"),
        ("bird-lib/setup.py", ""),
        ("wheels/a.whl", ""),
        (name, text),
    ):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(other)
    lab = load(root, f"image: {{{key}: {name}}}\n")
    if told:
        (problem,) = file_problems(lab)
        assert (problem.path, problem.line) == (f"image.{key}", 1)
        assert told in problem.message
    else:
        check_files(lab)


def test_extras_are_those_of_the_project(root: Path) -> None:
    (root / "pyproject.toml").write_text(
        "[project]\nname = 'a'\ndependencies = ['six']\n"
        "[project.optional-dependencies]\ntrain = ['torch']\n"
    )
    image = "image: {{requirements: pyproject.toml, extras: [{}]}}\n"
    lab = load(root, image.format("train"))
    check_files(lab)
    packages = read_packages(root, "pyproject.toml", lab.image.extras)
    assert (packages.files[packages.entry], packages.has_code) == ("six\ntorch\n", False)
    (problem,) = file_problems(load(root, image.format("gpu")))
    assert "'pyproject.toml' has no extra 'gpu'; it has train" in problem.message
    with pytest.raises(ConfigError) as raised:
        load(root, "image: {requirements: a.txt, extras: [train]}\n")
    assert "they go with requirements: pyproject.toml" in raised.value.problems[0].message


def test_the_build_gets_every_file_that_the_list_names(root: Path) -> None:
    for path, text in (
        ("deps/all.txt", "-r base.txt  # shared\n./lib[a]\n-e git+https://x.org/a#egg=a\n"),
        ("deps/base.txt", "six\n"),
        ("lib/setup.py", "setup()"),
        ("lib/requirements.txt", "numpy\n"),
        ("lib/lib.py", "import numpy"),
    ):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text)
    packages = read_packages(root, "deps/all.txt")
    assert packages.problems == ()
    assert packages.files == {
        "deps/all.txt": "-r base.txt  # shared\n-e ./lib[a]\ngit+https://x.org/a#egg=a\n",
        "deps/base.txt": "six\n",
        "lib/setup.py": "setup()",
        "lib/requirements.txt": "numpy\n",
    }
    assert (packages.entry, packages.has_code, packages.needs_git) == ("deps/all.txt", True, True)


def test_a_project_is_installed_in_place(root: Path) -> None:
    (root / "setup.cfg").write_text("[metadata]\nname = a\n")
    packages = read_packages(root, "setup.cfg", ("train", "viz"))
    assert packages.files[packages.entry] == "-e .[train,viz]\n"
    assert set(packages.files) == {packages.entry, "setup.cfg"}
    assert (packages.has_code, packages.needs_git) == (True, False)


def test_a_missing_list_of_packages(root: Path) -> None:
    (problem,) = file_problems(load(root, "image: {requirements: requirements.txt}\n"))
    assert "no file 'requirements.txt' in the lab" in problem.message
