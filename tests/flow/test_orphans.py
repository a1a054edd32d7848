"""Servers of other users on one Docker Engine: apart, and never removed without their name."""

from __future__ import annotations

import time

import msgspec
import pytest
from lab_world import LAB_ID, Labctl, Recorded, World

from labctl.events import Question
from labctl.lifecycle import up
from labctl.lifecycle.server_loss import ServerRemovedError, require_not_removed
from labctl.model import Run
from labctl.servers import context as context_module
from labctl.servers.leftovers import Orphans, end_orphans, end_others, find_orphans


class Typing(Recorded):
    """Confirms what needs no typing, and types `name`."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.name = name

    def confirm(self, decision: Question) -> bool:
        self.asked.append(decision)
        return decision.typed in ("", self.name)


def share_engine(lab: World) -> None:
    """One server of this user that is on no record here, and one of each of two others."""
    key = lab.places.keys_dir / LAB_ID / "id_ed25519"
    for name, owner, identity in (
        ("srv-mine", "root", str(key)),
        ("srv-ann", "ann", "/home/ann/.local/share/labctl/keys/a/id_ed25519"),
        ("srv-bob", "root", "/home/bob/.local/share/labctl/keys/b/id_ed25519"),
    ):
        server = lab.cloud.add(name, "letters", name)
        endpoint = msgspec.structs.replace(server.endpoint, identity=identity)
        lab.cloud.change(name, owner=owner, endpoint=endpoint)


def ids(orphans: Orphans) -> tuple[list[str], list[str]]:
    return [one.id for one in orphans.servers], [one.id for one in orphans.others]


def test_a_login_name_alone_does_not_make_a_server_ones_own(lab: World) -> None:
    share_engine(lab)
    assert ids(find_orphans(lab.context())) == (["srv-mine"], ["srv-ann", "srv-bob"])


def test_terminate_leaves_the_servers_of_others(lab: World) -> None:
    share_engine(lab)
    context = lab.context()
    left = end_orphans(context, find_orphans(context), kept_too=True)
    assert ids(left) == ([], ["srv-ann", "srv-bob"])
    assert not left.is_billing


def test_a_server_of_the_same_login_name_is_not_called_another_users(
    lab: World, labctl: Labctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the user's own, created with another home directory."""
    monkeypatch.setattr(context_module, "find_user_name", lambda: "root")
    share_engine(lab)
    counted = "1 server of another user and 1 server of root with another home directory are"
    assert f"{counted} not listed" in labctl(lab, "orphans").err
    rows = labctl(lab, "orphans", "--everyone").out.splitlines()
    assert [row.split(", of ")[1] for row in rows if ", of " in row] == [
        "ann",
        "root with another home",
    ]
    reporter = Typing()
    context = lab.context(reporter)
    end_others(context, find_orphans(context))
    details = [one.detail.splitlines()[0] for one in reporter.asked]
    assert details == [
        "Another user, ann, created:",
        "root, your login name too, created with another home directory:",
    ]


def test_only_the_typed_users_servers_are_terminated(lab: World) -> None:
    share_engine(lab)
    reporter = Typing("ann")
    context = lab.context(reporter)
    left = end_others(context, find_orphans(context))
    assert ids(left) == (["srv-mine"], ["srv-bob"])
    assert [one.typed for one in reporter.asked] == ["ann", "root"]
    assert "srv-ann (letters, running)" in reporter.asked[0].detail
    assert "the servers of root were not terminated" in reporter.said


def put_run(lab: World, server_id: str, run_id: str = "night", **fields: object) -> None:
    run = Run(id=run_id, lab_id=LAB_ID, server_id=server_id, state="running", **fields)  # type: ignore[arg-type]
    lab.context().state.save_run(run)


def test_terminate_names_each_server_and_its_run_before_and_after(
    lab: World,
) -> None:
    server = up.up(lab.context())
    put_run(lab, server.id, created_at=time.time() - 600, seen_at=time.time() - 180)
    lab.cloud.add("srv-other", "birds", "b1b2b3b4b5b6")
    reporter = Recorded()
    context = lab.context(reporter)
    left = end_orphans(context, find_orphans(context), kept_too=False)
    [question] = reporter.asked
    assert question.question == "terminate 2 servers?"
    lines = question.detail.splitlines()
    assert f"  {server.id} (digits, running): run night was running 3 min ago" in lines
    assert "  srv-other (birds, running): its runs are not on record here" in lines
    assert {one.id for one in left.terminated} == {server.id, "srv-other"}


def test_what_others_ended_meanwhile_is_not_said_to_be_terminated_here(lab: World) -> None:
    share_engine(lab)
    context = lab.context()
    listed = find_orphans(context)
    lab.cloud.terminate("srv-ann")
    left = end_orphans(context, listed, kept_too=False)
    assert [one.id for one in left.terminated] == ["srv-mine"]
    left = end_others(lab.context(Typing("root")), left)
    assert [one.id for one in left.terminated] == ["srv-mine", "srv-bob"]


def test_the_command_says_what_it_terminated(lab: World, labctl: Labctl) -> None:
    server = up.up(lab.context())
    said = labctl(lab, "orphans", "--terminate", "--yes")
    assert (said.code, said.out) == (
        0,
        f"terminated {server.id} (digits)\nNow there is nothing at cloud that labctl created.\n",
    )


def test_a_server_that_orphans_terminated_is_not_replaced(lab: World, labctl: Labctl) -> None:
    """By a `labctl run --recover` that follows its run."""
    up.up(lab.context())
    labctl(lab, "orphans", "--terminate", "--yes")
    with pytest.raises(ServerRemovedError, match="was removed by `labctl orphans`"):
        require_not_removed(lab.context(), None)


def test_what_orphans_terminated_is_named_by_the_commands_that_miss_it(
    lab: World, labctl: Labctl
) -> None:
    server = up.up(lab.context())
    put_run(lab, server.id, created_at=time.time() - 60)
    labctl(lab, "orphans", "--terminate", "--yes")
    ended = "`labctl orphans` terminated it at 20"
    status = labctl(lab, "status").out
    assert f"its last server ended: {ended}" in status
    assert f"its server ended: {ended}" in status
    pulled = labctl(lab, "pull")
    assert "the results of night were on the server that ended, and no copy was saved" in pulled.err
    assert ended in pulled.err
    assert "next: labctl run --up" in pulled.err
    (lab.home / "lab" / "runs" / "night").mkdir(parents=True)
    (lab.home / "lab" / "runs" / "night" / "run.json").write_bytes(
        msgspec.json.encode(Run(id="night", lab_id=LAB_ID, server_id=server.id, state="running"))
    )
    assert "what night had written before the last pull is in runs/night" in labctl(lab, "pull").err
