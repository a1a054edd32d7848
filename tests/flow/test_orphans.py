"""Servers of other users on one Docker Engine: apart, and never removed without their name."""

from __future__ import annotations

import msgspec
import pytest
from lab_world import LAB_ID, Labctl, Recorded, World

from labctl.events import Question
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
