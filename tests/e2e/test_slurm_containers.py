"""A run on a cluster in a container: podman, without root, inside the job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import PODMAN_OPTIONS, Cluster, build_podman_image, run_cluster
from sshd_container import docker, wait_for
from test_slurm_runs import Labctl, read_run

from labctl.servers.host_keys import ensure_key_pair

pytestmark = [pytest.mark.engine, pytest.mark.long]

LAB = """\
lab: boxed
server:
  provider: slurm
  gpu: none
  slurm:
    login: {{host: 127.0.0.1, port: {port}, user: student, identity: '{key}'}}
    partition: gpu
    qos: student
    runtime: {runtime}
image: /shared/base.tar
env: {{COLOR: "two, words"}}
secrets: [TOKEN]
run: sh train.sh
"""
TRAIN = """\
trap 'echo weights >"$LABCTL_CHECKPOINT_DIR/model"; exit 143' TERM
echo "as $(id -un) in $(. /etc/os-release; echo $NAME) with $COLOR and $TOKEN at $HOME"
[ ! -e /shared ] && [ -r /lab/code/train.sh ] && [ -r train.sh ] && echo "the files of the lab only"
touch /lab/data/x 2>/dev/null || echo "data cannot be changed"
while :; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("keys")
    with run_cluster(folder, build_podman_image(), PODMAN_OPTIONS) as cluster:
        archive = folder / "base.tar"
        docker("save", "-o", str(archive), "labctl-base:bookworm")
        archive.chmod(0o644)
        cluster.sh("mkdir -m 755 /shared")
        docker("cp", str(archive), f"{cluster.name}:/shared/base.tar")
        yield cluster


@pytest.fixture(scope="module")
def project(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("home") / "boxed"
    directory.mkdir()
    text = LAB.format(port=cluster.port, key=cluster.key, runtime="auto")
    (directory / "lab.yaml").write_text(text)
    (directory / "train.sh").write_text(TRAIN)
    ensure_key_pair(directory.parent / ".ssh" / "id_ed25519")
    return directory


@pytest.fixture(scope="module")
def labctl(project: Path) -> Iterator[Labctl]:
    labctl = Labctl(project)
    labctl("up", "--yes")
    yield labctl
    labctl("down", "--yes")


def test_a_run_has_its_image_and_the_files_of_its_lab(
    labctl: Labctl, project: Path, cluster: Cluster
) -> None:
    labctl("run", "--detach", "--id", "boxed", TOKEN="sesame")
    wait_for(lambda: "data cannot be changed" in labctl("logs", "boxed").stdout)
    log = labctl("logs", "boxed").stdout
    assert "in Debian GNU/Linux with two, words and sesame at /lab/cache/home" in log
    assert "the files of the lab only" in log
    assert "sesame" not in cluster.sh("ps -eo args")
    beside = labctl("exec", "boxed", "--", "sh", "-c", "echo $LABCTL_RUN_ID; ls /lab/run", code=0)
    assert beside.stdout.split()[:2] == ["boxed", "checkpoints"]
    assert "canceled (SIGTERM)" in labctl("cancel", "boxed").stdout
    assert cluster.sh("ps -eo args | grep -c [t]rain.sh || true").strip() == "0"
    labctl("pull", "boxed")
    assert (project / "runs" / "boxed" / "checkpoints" / "model").read_text() == "weights\n"
    assert read_run(labctl, "boxed")["image"] == "/shared/base.tar"
    labctl("run", "--id", "failing", "--", "sh", "-c", "exit 7", code=7, TOKEN="sesame")


def test_a_machine_without_the_runtime_says_so(labctl: Labctl, project: Path) -> None:
    file = project / "lab.yaml"
    file.write_text(file.read_text().replace("runtime: auto", "runtime: apptainer"))
    labctl("trust", "--yes")
    done = labctl("run", "--id", "other", code=126, TOKEN="sesame")
    assert "has no singularity to run a container" in done.stdout
