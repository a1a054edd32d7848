"""A machine image for a course: one server filled, cleaned, baked and ended."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from course_context import Class, ClassCloud, a_class, roster
from lab_world import Machine

from labctl.cli.course_costs import print_course_costs
from labctl.cli.course_plan import print_plan
from labctl.courses import bake as baking
from labctl.courses import servers
from labctl.courses.bake import bake, drop_images
from labctl.courses.context import (
    BAKED,
    build_own_context,
    build_seat_contexts,
    find_baked_image,
)
from labctl.courses.costs import compute_costs
from labctl.courses.plan import compute_plan
from labctl.errors import PolicyError, ProviderError
from labctl.model import CreateServerRequest, Offer, Resource, Server, Value
from labctl.servers import machine_images
from labctl.servers.context import LabContext
from labctl.transports import Result


class Settings(Value, frozen=True):
    image: str = ""


class BakingCloud(ClassCloud):
    """One that makes images: an image and its snapshot, which goes only after it."""

    settings_type = Settings
    fails = ""
    image = ""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.booted_images: list[str] = []

    def create(self, offer: Offer, request: CreateServerRequest) -> Server:
        self.booted_images.append(self.image)
        return super().create(offer, request)

    def bake(self, server_id: str, name: str, tags: dict[str, str]) -> str:
        self.calls.append("bake")
        assert server_id in self.machines
        for kind, price in (("snapshot", 4.0), ("image", 0.0)):
            self.left.append(
                Resource(
                    provider=self.name,
                    kind=kind,
                    id=f"{kind}-{name}",
                    lab=tags["labctl:lab"],
                    lab_id=tags["labctl:lab-id"],
                    price_usd_per_month=price,
                    expires_at=float(tags["labctl:expires"]),
                )
            )
        return f"image-{name}"

    def get_image_state(self, image_id: str) -> str:
        return self.fails or "ready"

    @classmethod
    def with_image(cls, settings: Settings, image_id: str) -> Settings:
        return msgspec.structs.replace(settings, image=image_id)

    def estimate_image_usd_per_month(self) -> float:
        return 5.0


@pytest.fixture
def ml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Class:
    data = tmp_path / "digits"
    data.mkdir()
    (data / "train.npz").write_text("numbers")
    one = a_class(tmp_path, monkeypatch, roster(["alice"]), f"data: {{digits: {data}}}\n")
    one.cloud = BakingCloud(one.cloud.key)
    one.cloud.price = 0.5
    said = Machine._answer

    def as_root(machine: Machine, line: str, stdin: bytes) -> Result:
        """Cleaning needs root, and would clean this very machine: it is looked at alone."""
        if line.startswith("sudo"):
            machine.lines.append(line)
            return Result(code=0)
        return said(machine, line, stdin)

    monkeypatch.setattr(Machine, "_answer", as_root)
    build = servers.build_course_context

    def build_with_own_provider(*words: Any, **named: Any) -> LabContext:
        """Each provider has its own settings; what they know of servers is shared."""
        context = build(*words, **named)
        provider = context.__dict__["provider"] = copy(one.cloud)
        provider.image = context.config.server.provider_settings["local"].image
        return context

    monkeypatch.setattr(servers, "build_course_context", build_with_own_provider)
    monkeypatch.setattr(machine_images, "get_provider_class", lambda name: BakingCloud)
    counted = iter(range(100))
    monkeypatch.setattr(baking, "_stamp", lambda: f"{next(counted):03}")
    return one


def record(one: Class) -> dict[str, Any]:
    return dict(msgspec.json.decode((one.folder.private / BAKED).read_bytes()))


def as_local(one: Class) -> None:
    """The fake cloud stands for the provider that course.yaml names."""
    found = record(one) | {"provider": "local"}
    (one.folder.private / BAKED).write_bytes(msgspec.json.encode(found))


def test_one_server_is_filled_baked_and_ended(ml: Class) -> None:
    found = bake(ml.staff())
    assert found.data == ("digits",)
    assert found.usd_per_month == 4.0
    assert ml.cloud.calls.count("create") == 1
    assert not ml.cloud.machines
    (machine,) = ml.machines.values()
    assert list(machine.home.glob("labctl/*/data/digits/train.npz"))
    (cleaned,) = [line for line in machine.lines if line.startswith("sudo")]
    for word in (
        "ssh_host_",
        "authorized_keys",
        "watchdog",
        "machine-id",
        "/opt/labctl/course",
        "labctl/ttl",
    ):
        assert word in cleaned
    assert [one.about for one in ml.reporter.asked] == ["price"]


def test_plan_and_cost_show_the_price_of_the_image(
    ml: Class, capsys: pytest.CaptureFixture[str]
) -> None:
    before = compute_plan(ml.staff())
    assert (before.image, before.image_at_most_usd) == (None, 5.0)
    print_plan(before)
    assert "if baked, machine image per month $5.00" in " ".join(capsys.readouterr().out.split())
    assert compute_costs(ml.staff()).image_usd_per_month == 0.0
    bake(ml.staff())
    as_local(ml)
    after = compute_plan(ml.staff())
    assert after.image is not None
    assert (after.image.usd_per_month, after.image_at_most_usd) == (4.0, None)
    print_plan(after)
    assert "baked machine image, per month $4.00" in " ".join(capsys.readouterr().out.split())
    costs = compute_costs(ml.staff())
    assert costs.image_usd_per_month == 4.0
    print_course_costs(costs, {})
    assert "and $4.00 a month for the machine image" in capsys.readouterr().out
    drop_images(ml.staff())
    assert compute_costs(ml.staff()).image_usd_per_month == 0.0


def test_a_course_with_nothing_to_bake_shows_no_price(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = a_class(tmp_path, monkeypatch, roster(["alice"]))
    one.cloud = BakingCloud(one.cloud.key)
    assert compute_plan(one.staff()).image_at_most_usd is None


def test_seats_boot_from_it_until_it_is_dropped(ml: Class) -> None:
    found = bake(ml.staff())
    as_local(ml)
    staff = ml.staff()
    (context,) = build_seat_contexts(staff.folder, staff.paths, staff.state, staff.reporter)
    assert context.config.server.provider_settings["local"].image == found.image_id
    gone = drop_images(staff)
    assert [one.kind for one in sorted(gone, key=lambda one: one.kind)] == ["image", "snapshot"]
    assert not ml.cloud.left
    assert find_baked_image(ml.staff().folder) is None


def test_a_new_one_takes_the_old_ones_place(ml: Class) -> None:
    first = bake(ml.staff())
    second = bake(ml.staff())
    assert first.image_id != second.image_id
    assert {one.id.removeprefix(f"{one.kind}-") for one in ml.cloud.left} == {
        second.image_id.removeprefix("image-")
    }


def test_the_old_one_is_used_until_a_new_one_is_ready(ml: Class) -> None:
    assert isinstance(ml.cloud, BakingCloud)
    bake(ml.staff())
    as_local(ml)
    before = find_baked_image(ml.folder)
    ml.reporter.answers.append(False)
    with pytest.raises(PolicyError, match="nothing was started"):
        bake(ml.staff())
    assert before is not None
    assert find_baked_image(ml.folder) == before
    # The server to bake boots from the provider's own image all the same.
    bake(ml.staff())
    assert ml.cloud.booted_images == ["", ""]


def test_a_server_of_the_course_boots_as_the_course_does(ml: Class) -> None:
    baked = bake(ml.staff())
    as_local(ml)
    staff = ml.staff()
    for uses_baked_image, image_id in ((True, baked.image_id), (False, "")):
        course = staff.course(plain=True, uses_baked_image=uses_baked_image)
        own = build_own_context(staff.folder, course, "bake")
        assert own.config.server.provider_settings["local"].image == image_id


def test_one_that_failed_is_never_booted_from(ml: Class) -> None:
    assert isinstance(ml.cloud, BakingCloud)
    ml.cloud.fails = "failed: no room"
    with pytest.raises(ProviderError, match="cannot be used"):
        bake(ml.staff())
    assert find_baked_image(ml.staff().folder) is None
    drop_images(ml.staff())
    assert not ml.cloud.left


def test_a_provider_without_images_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = a_class(tmp_path, monkeypatch, roster(["alice"]))
    with pytest.raises(PolicyError, match="cannot make machine images"):
        bake(plain.staff())
    assert not plain.cloud.calls
