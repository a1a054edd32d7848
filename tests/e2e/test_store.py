"""A store on a real SSH server: mirrored to beside a run, cut off, filled up, and restored from."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from lab_servers import wait_for
from store_lab import StoreLab, store_lab

from labctl.errors import NotFoundError, TransferError
from labctl.stores.lab_store import mirror_now, open_lab_store, restore_run

pytestmark = pytest.mark.engine
RUN = "long"


@pytest.fixture(scope="module")
def stored(
    tmp_path_factory: pytest.TempPathFactory, base_image: str, server_image: str
) -> Iterator[StoreLab]:
    """A lab with a run that goes on until the last test but one."""
    with store_lab(tmp_path_factory.mktemp("store"), base_image) as made:
        made.lab.labctl("run", "--yes", "--detach", "--id", RUN)
        yield made


def verified(stored: StoreLab, run: str = RUN) -> set[str]:
    """What the index names, every file of it in the store as it says."""
    while True:
        index = stored.index(run)
        there = stored.store.hashes(f"{stored.prefix}/runs/{run}/files")
        if stored.index(run) == index:
            break
    logs = {name for name in index if name.startswith("logs/")}  # they grow
    assert {n: there.get(n) for n in index if n not in logs} == {
        n: sha256 for n, (_, sha256) in index.items() if n not in logs
    }
    return {*index}


def test_checkpoints_are_mirrored_while_the_run_goes_on(stored: StoreLab) -> None:
    wait_for(lambda: any("manifest.json" in name for name in stored.index(RUN)))
    names = verified(stored)
    assert "logs/run.log" in names
    tops = {name.rpartition("/")[0] for name in names if name.startswith("checkpoints/")}
    for top in tops:
        assert {f"{top}/model", f"{top}/manifest.json"} <= names
        assert not top.endswith(".new")
    shown = stored.shown(lambda mirror: mirror.at > 0)
    assert shown.failed == ""
    # The first pass may have described the run before its container ran.
    place = f"{stored.prefix}/runs/{RUN}/run.json"
    wait_for(lambda: stored.store.read(place)["record"]["state"] == "running")
    about = stored.store.read(place)
    assert about["spec"]["id"] == RUN
    code = stored.store.hashes(f"{stored.prefix}/runs/{RUN}")["code.tar"]
    assert about["code"]["sha256"] == code
    assert json.loads((stored.lab.labctl("status", "--refresh", "--json")).stdout)["runs"]


def server_key(stored: StoreLab, words: str, body: bytes = b"") -> str:
    """ssh from the server with its own key, and what it is answered."""
    own = "~/labctl/stored/.labctl"
    line = (
        f"printf %s {base64.b64encode(body).decode()} | base64 -d | ssh -F none -o BatchMode=yes "
        f"-T -o IdentitiesOnly=yes -o UserKnownHostsFile={own}/store-hosts "
        f"-o HostKeyAlias=labctl-store -o StrictHostKeyChecking=yes -i {own}/store-key {words} 2>&1"
    )
    return stored.lab.student(line, check=False)


def asked(stored: StoreLab, **request: Any) -> dict[str, Any]:
    line = json.dumps(request).encode() + b"\n"
    said = server_key(stored, f"student@{stored.store.address}", line)
    found: dict[str, Any] = json.loads(said.splitlines()[0])
    return found


@pytest.mark.long
def test_the_servers_key_opens_its_own_prefix_and_nothing_else(stored: StoreLab) -> None:
    where = f"student@{stored.store.address}"
    stored.store.sh("mkdir -p ~/labs/other-1; echo theirs > ~/labs/other-1/secret; umask 077")
    assert stored.store.sh("cat ~/labs/other-1/secret") == "theirs\n"
    for words in (f"{where} id", f"{where} cat /etc/passwd", f"-s {where} sftp"):
        said = server_key(stored, words, b"id\n")
        assert "invalid request" in said, (words, said)
        assert "uid=" not in said
    assert "PTY allocation request failed" in server_key(stored, f"-tt {where}", b"id\n")
    assert "forward" in server_key(stored, f"-W 127.0.0.1:22 {where}").lower()
    for key in ("../other-1/secret", "/etc/passwd", "../../.ssh/authorized_keys"):
        assert asked(stored, do="get", key=key, offset=0, length=100)["error"] == "name"
        assert asked(stored, do="put", key=key, size=0, sha256="0" * 64, offset=0, length=0)
    stored.store.sh(f"ln -s ../other-1 ~/labs/{stored.prefix}/link")
    reply = asked(stored, do="get", key="link/secret", offset=0, length=100)
    assert reply["error"] == "name"
    assert "error" in asked(stored, do="delete", key="runs", length=0)
    assert "error" in asked(stored, do="list", prefix="", length=0)
    stored.store.sh(f"rm ~/labs/{stored.prefix}/link")
    keys = stored.store.sh("cat ~/.ssh/authorized_keys").splitlines()
    assert len(keys) == 2, "the person's own, and one for the lab"
    assert keys[1].startswith('restrict,command="')


@pytest.mark.long
def test_a_store_that_cannot_be_reached_for_a_while(stored: StoreLab) -> None:
    before = stored.index(RUN)
    # The person's own connection passes: only the server's is cut.
    server = stored.lab.sh("hostname -i").split()[0]
    cut = f"-s {server} -p tcp --dport 22 -j DROP"
    stored.store.box.sh(f"iptables -I INPUT {cut}")
    try:
        failed = stored.shown(lambda mirror: bool(mirror.failed))
        assert "cannot reach the store" in failed.failed
        assert stored.lab.seen(RUN)["state"] == "running"
    finally:
        stored.store.box.sh(f"iptables -D INPUT {cut}")
    stored.shown(lambda mirror: not mirror.failed)
    wait_for(lambda: stored.index(RUN) != before)
    verified(stored)


@pytest.mark.long
def test_a_store_that_is_full(stored: StoreLab) -> None:
    stored.store.sh("head -c 100000000 /dev/zero > ~/labs/filling 2>/dev/null || :")
    try:
        # The first that does not fit may be the index alone, and then nothing is behind yet.
        stored.shown(lambda mirror: "full" in mirror.failed and mirror.behind_bytes > 0)
        assert stored.lab.seen(RUN)["state"] == "running"
        names = {*stored.index(RUN)}
        assert any("manifest.json" in name for name in names), "what was there stays"
    finally:
        stored.store.sh("rm ~/labs/filling")
    stored.shown(lambda mirror: not mirror.failed)
    verified(stored)


@pytest.mark.long
def test_the_mirror_killed_in_the_middle_begins_again(stored: StoreLab) -> None:
    before = {*stored.index(RUN)}
    killed = stored.lab.sh("pkill -9 -f 'mirror-serv[e]' && echo yes", check=False)
    assert killed.strip() == "yes"
    wait_for(lambda: {*stored.index(RUN)} - before)
    stored.shown(lambda mirror: not mirror.failed)
    verified(stored)


def test_another_server_is_made_from_the_store_alone(stored: StoreLab) -> None:
    stored.lab.let_go(RUN)
    path = f"{stored.prefix}/runs/{RUN}/run.json"
    wait_for(lambda: stored.store.read(path)["record"]["state"] == "exited")
    mirror_now(stored.context, stored.context.get_server())
    whole = stored.run_hashes(RUN)
    kept = {n: h for n, h in whole.items() if n.startswith(("code/", "logs/", "checkpoints/"))}
    newest = max(name for name in kept if name.startswith("checkpoints/")).rpartition("/")[0]
    old_key = stored.store.sh("cat ~/.ssh/authorized_keys").splitlines()[1]
    stored.lab.labctl("down", "--yes", "--discard")
    place = f"~/labs/{stored.prefix}/runs/{RUN}/files/{newest}"
    stored.store.sh(f"cd {place} && printf x | dd of=model bs=1 seek=100 conv=notrunc 2>&1")
    stored.up()
    new_key = stored.store.sh("cat ~/.ssh/authorized_keys").splitlines()[1:]
    assert len(new_key) == 1
    assert old_key not in new_key
    context = stored.context
    with pytest.raises(NotFoundError, match="has no files of run never"):
        restore_run(context, context.get_server(), "never")
    reply = restore_run(context, context.get_server(), RUN)
    assert f"{newest}/" in {name for name, _ in reply.left_out}
    assert reply.run.state == "exited"
    now = stored.run_hashes(RUN)
    assert now == {n: h for n, h in kept.items() if not n.startswith(f"{newest}/")}
    assert mirror_now(context, context.get_server()).failed == ()


def test_the_person_reads_it_too(stored: StoreLab) -> None:
    store = open_lab_store(stored.context)
    assert store.read(f"runs/{RUN}/index.json")
    about = json.loads(store.read(f"runs/{RUN}/run.json") or b"{}")
    target = stored.lab.root / "code.tar"
    store.fetch(f"runs/{RUN}/code.tar", target, **about["code"])
    assert target.stat().st_size == about["code"]["size"]
    with pytest.raises(TransferError):
        store.fetch(f"runs/{RUN}/code.tar", target, about["code"]["size"], "0" * 64)
    assert store.swap("runs/x/watch.json", b"laptop", None)
    assert not store.swap("runs/x/watch.json", b"keeper", None)
