"""A built image is built once: for a second lab, a new server, and through a registry."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import registry_container
from lab_directory import LabDirectory, make_lab
from lab_servers import drop_pool, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.long]

# A later layer hides a file and replaces a directory.
REPLACED = """\
RUN mkdir /replaced && touch /replaced/old /removed
RUN rm -r /removed /replaced && mkdir /replaced && touch /replaced/new
"""


@dataclass
class TwoLabs:
    """Labs of one user with the same Dockerfile; each has a server without any image."""

    first: LabDirectory
    second: LabDirectory
    image: str

    def archive(self) -> Path:
        tag = self.image.partition(":")[2]
        (archive,) = (Path(self.first.environ["HOME"]) / ".cache/labctl/images").glob(f"{tag}*.tar")
        return archive

    def forget_image(self, lab: LabDirectory, *images: str) -> None:
        lab.student("docker rm -f $(docker ps -aq)", check=False)
        lab.student(f"docker rmi -f {' '.join(images or [self.image])}")


def copy_lab(lab: LabDirectory, name: str) -> LabDirectory:
    root = lab.root.with_name(name)
    shutil.copytree(lab.root, root, ignore=shutil.ignore_patterns(".labctl"))
    text = (root / "lab.yaml").read_text().replace(f"lab: {lab.name}", f"lab: {name}")
    (root / "lab.yaml").write_text(text)
    return LabDirectory(root, name, lab.environ)


@pytest.fixture(scope="module")
def labs(
    tmp_path_factory: pytest.TempPathFactory, base_image: str, server_image: str, small_image: str
) -> Iterator[TwoLabs]:
    # Based on 2 MB: what these tests do with an image takes long for a large one.
    local = f"  local: {{image: {server_image}}}\n"
    first = make_lab(tmp_path_factory.mktemp("images"), "e2e-images", small_image, local)
    owner = f"tests-{secrets.token_hex(4)}"
    # a pool of its own: its servers start without images
    first.environ["LOGNAME"] = first.environ["LABCTL_CACHE_POOL"] = owner
    dockerfile = (first.root / "Dockerfile").read_text() + f"RUN echo {owner} > /owner\n{REPLACED}"
    (first.root / "Dockerfile").write_text(dockerfile)
    second = copy_lab(first, "e2e-images-2")
    with ExitStack() as ended:
        ended.callback(drop_pool, base_image, owner)
        for lab in (first, second):
            ended.callback(lab.labctl, "down", "--yes", "--discard")
            lab.server_id = lab.json("up", "--yes")["server"]["id"]
        ran = first.labctl("run", "--yes", "--", "cat", "/owner")
        assert "building the image (labctl/built:" in ran.stderr
        image = ran.stderr.split("building the image (")[1].split(")")[0]
        wait_for(lambda: first.json("images")["images"])
        yield TwoLabs(first, second, image)


def test_a_second_lab_on_a_new_server_loads_what_the_first_built(labs: TwoLabs) -> None:
    ran = labs.second.labctl("run", "--yes", "--", "cat", "/owner")
    assert ran.stdout.strip() == labs.second.environ["LOGNAME"]
    assert f"loading {labs.image}" in ran.stderr
    assert "building" not in ran.stderr
    line = f"docker image inspect --format '{{{{.Id}}}}' {labs.image}"
    ids = {lab.student(line) for lab in (labs.first, labs.second)}
    assert len(ids) == 1


@pytest.mark.long
def test_a_server_beside_another_one_starts_with_its_images(labs: TwoLabs) -> None:
    third = copy_lab(labs.first, "e2e-images-3")
    # A volume of an ended server that never had the image: a copy is better.
    owner, empty = third.environ["LOGNAME"], f"labctl-cache-{secrets.token_hex(4)}"
    words = ["docker", "volume", "create", "--label", f"labctl.cache={owner}", empty]
    subprocess.run(words, check=True, capture_output=True)
    try:
        third.server_id = third.json("up", "--yes")["server"]["id"]
        line = f"docker image inspect --format '{{{{.Id}}}}' {labs.image}"
        assert third.student(line) == labs.first.student(line)
        shown = "cat /owner; for f in /removed /replaced/*; do test ! -e $f || echo $f; done"
        ran = third.labctl("run", "--yes", "--", "sh", "-c", shown)
        assert "loading" not in ran.stderr
        assert "building" not in ran.stderr
        assert ran.stdout.split() == [labs.first.environ["LOGNAME"], "/replaced/new"]
    finally:
        third.labctl("down", "--yes", "--discard")


@pytest.mark.long
def test_up_loads_an_image_in_advance(labs: TwoLabs) -> None:
    labs.forget_image(labs.second)
    labs.second.labctl("up", "--yes")
    wait_for(lambda: labs.second.student(f"docker images -q {labs.image}"))


@pytest.mark.long
def test_a_damaged_archive_is_refused_and_the_image_built(labs: TwoLabs) -> None:
    labs.forget_image(labs.second)
    archive = labs.archive()
    with archive.open("r+b") as file:
        file.seek(archive.stat().st_size // 2)
        file.write(secrets.token_bytes(64))
    ran = labs.second.labctl("run", "--yes", "--", "cat", "/owner")
    assert f"{archive} is damaged" in ran.stderr
    assert f"building the image ({labs.image})" in ran.stderr
    wait_for(lambda: labs.second.json("images")["images"])


@pytest.mark.long
def test_a_server_that_ends_while_an_image_loads_loses_nothing(labs: TwoLabs) -> None:
    lab = labs.second
    labs.forget_image(lab)
    run = lab.start("run", "--yes", "--", "cat", "/owner")
    run.said(f"loading {labs.image}")
    # Stopped, so that the load cannot end before the server does.
    wait_for(lambda: lab.sh("pkill -STOP -f '^docker load' && echo stopped", check=False))
    subprocess.run(["docker", "rm", "-f", lab.server_id], check=True, capture_output=True)
    run.end(255)
    assert "lost the connection to the server while sending an image" in run.stderr
    assert "labctl status --refresh\n        labctl up" in run.stderr
    assert labs.archive().exists()
    lab.server_id = lab.json("up", "--yes")["server"]["id"]
    ran = lab.labctl("run", "--yes", "--", "cat", "/owner")
    assert ran.stdout.strip() == lab.environ["LOGNAME"]
    assert "building" not in ran.stderr


@pytest.mark.long
def test_a_built_image_is_pushed_to_the_registry_and_pulled_from_it(labs: TwoLabs) -> None:
    host = registry_container.HOST
    lab = labs.second
    text = (lab.root / "lab.yaml").read_text()
    registry = f"image: {{build: ., registry: {host}/labs, args: {{A: b}}}}"
    (lab.root / "lab.yaml").write_text(text.replace("image: {build: .}", registry))
    architecture = lab.student("docker version --format '{{.Server.Arch}}'").strip()
    with registry_container.run_registry(lab.server_id):
        ran = lab.labctl("run", "--yes", "--", "cat", "/owner")
        image = ran.stderr.split("building the image (")[1].split(")")[0]
        tag = f"{image.partition(':')[2]}-{architecture}"
        reference = f"{host}/labs:{tag}"
        wait_for(lambda: tag in lab.student(f"curl -s http://{host}/v2/labs/tags/list"))

        wait_for(lambda: image in str(lab.json("images")))
        lab.labctl("images", "--remove", image)
        labs.forget_image(lab, image, reference)
        ran = lab.labctl("run", "--yes", "--", "cat", "/owner")
        assert f"pulling {reference}" in ran.stderr
        assert "building" not in ran.stderr

        other = "arm64" if architecture == "amd64" else "amd64"
        registry_container.change_architecture(lab.server_id, "labs", tag, other)
        labs.forget_image(lab, image, reference)
        ran = lab.labctl("run", "--yes", "--", "cat", "/owner")
        assert f"{host}/labs gave the server no {tag}, so it builds it: " in ran.stderr
        assert f"the image is for {other}, and the server needs {architecture}" in ran.stderr
        assert ran.stdout.strip() == labs.second.environ["LOGNAME"]
