"""Leases by the real script under a real sh, in a directory of this machine."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from labctl.commands import lease
from labctl.commands.lease import Holder, MachineLease
from labctl.errors import ProviderError

HOUR_S = 3600


def holder(token: str, owner: str = "alice") -> Holder:
    return Holder(token=token, lab="digits", lab_id="f00", owner=owner, created_at=12.5)


class Machine:
    """A directory of leases, and `sh` to run lines on it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def ask(self, line: str) -> MachineLease:
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return lease.parse(done.stdout)

    def claim(self, token: str, span_s: int = HOUR_S) -> MachineLease:
        return self.ask(lease.claim(holder(token), span_s, directory=str(self.directory)))

    def show(self, token: str = "") -> MachineLease:
        return self.ask(lease.show(token, directory=str(self.directory)))

    def renew(self, token: str, span_s: int = HOUR_S) -> MachineLease:
        return self.ask(lease.renew(token, span_s, directory=str(self.directory)))

    def release(self, token: str) -> MachineLease:
        return self.ask(lease.release(token, directory=str(self.directory)))

    def await_expiry(self) -> None:
        """Until just before the newest lease expires."""
        newest = max(self.directory.iterdir(), key=lambda path: int(path.name.split("-")[1]))
        expires_s = json.loads((newest / "owner.json").read_text())["expires_s"]
        while float(Path("/proc/uptime").read_text().split()[0]) < expires_s - 0.03:
            time.sleep(0.005)

    def generations(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


class EarlierLabctl(Machine):
    """The script of labctl 0.1.0, which takes no lock, on the same leases."""

    SCRIPT = Path(__file__).with_name("earlier_lease.sh").read_text()

    def ask(self, line: str) -> MachineLease:
        assignments = line.partition("\n")[0]
        return super().ask(f"{assignments}\n{self.SCRIPT}")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "leases")


def test_nothing_is_made_by_looking(machine: Machine) -> None:
    assert machine.show() == MachineLease(state="free")
    assert machine.release("aa") == MachineLease(state="free")
    assert not machine.directory.exists()


def test_a_claim_and_who_holds_it(machine: Machine) -> None:
    got = machine.claim("aa", 100)
    assert (got.state, got.holder) == ("mine", holder("aa"))
    assert 60 <= got.left_s <= 100
    assert machine.directory.stat().st_mode & 0o7777 == 0o1777
    refused = machine.claim("bb")
    assert (refused.state, refused.holder) == ("held", holder("aa"))
    assert machine.show("aa").state == "mine"
    assert machine.show("bb").state == machine.show().state == "held"
    assert machine.generations() == ["lease-1"]


def test_a_token_that_is_part_of_another_is_another(machine: Machine) -> None:
    machine.claim("aabb")
    assert machine.show("aa").state == "held"
    assert machine.show("*").state == "held"
    assert machine.claim("bb").state == "held"


def test_the_same_claim_again_keeps_it(machine: Machine) -> None:
    machine.claim("aa")
    assert machine.claim("aa").state == "mine"
    assert machine.generations() == ["lease-1"]


def test_released_is_free_for_the_next_generation(machine: Machine) -> None:
    machine.claim("aa")
    assert machine.release("bb").state == "held"
    assert machine.release("aa").state == "free"
    assert machine.show("aa").state == "free"
    assert machine.generations() == [], "nothing stays on a machine that nobody uses"
    assert machine.claim("bb").state == "mine"
    assert machine.release("aa").state == "held"
    assert machine.generations() == ["lease-1"]


def test_a_lease_that_cannot_be_deleted_is_released_all_the_same(
    machine: Machine, tmp_path: Path
) -> None:
    """Without flock, or while another labctl holds the lock for long."""
    machine.claim("aa")
    (tmp_path / "flock").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "flock").chmod(0o755)
    line = lease.release("aa", directory=str(machine.directory))
    assert machine.ask(f"PATH={tmp_path}:$PATH; {line}").state == "free"
    assert machine.generations() == ["lease-1"]
    assert machine.claim("bb").state == "mine"


def test_expired_is_free(machine: Machine) -> None:
    machine.claim("aa", 1)
    end = time.monotonic() + 120
    while machine.show("aa").state != "free":
        assert time.monotonic() < end
    assert machine.claim("bb").holder == holder("bb")


def test_another_boot_makes_it_free(machine: Machine) -> None:
    machine.claim("aa")
    owner = machine.directory / "lease-1" / "owner.json"
    said = json.loads(owner.read_text())
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert said["boot_id"] == boot
    owner.write_text(owner.read_text().replace(boot, boot[::-1]))
    assert machine.show("aa").state == "free"
    assert machine.claim("bb").state == "mine"


def test_renewing(machine: Machine) -> None:
    machine.claim("aa", 100)
    renewed = machine.renew("aa", 500)
    assert renewed.holder == holder("aa")
    assert 460 <= renewed.left_s <= 500
    assert machine.renew("bb", 900).left_s <= 500
    machine.release("aa")
    assert machine.renew("aa").state == "free"


def test_a_half_made_lease_is_taken_over(machine: Machine) -> None:
    """Somebody made the directory and died before saying who."""
    machine.directory.mkdir(mode=0o1777)
    (machine.directory / "lease-1").mkdir()
    assert machine.claim("aa").state == "mine"
    assert machine.generations() == ["lease-1", "lease-2"]


@pytest.mark.parametrize("content", ["", "{", "nonsense", '{"boot_id":"x"}', "\0\1\2"])
def test_nonsense_is_no_lease(machine: Machine, content: str) -> None:
    (machine.directory / "lease-1").mkdir(parents=True)
    (machine.directory / "lease-1" / "owner.json").write_text(content)
    assert machine.show().state == "free"
    assert machine.claim("aa").state == "mine"


def test_odd_names_beside_the_leases_do_not_matter(machine: Machine) -> None:
    machine.claim("aa")
    for name in ("lease-x", "lease-", "lease-007", "lease-99999999999999999999", "lease-1 2", "-n"):
        (machine.directory / name).mkdir()
    assert machine.show("aa").state == "mine"
    machine.release("aa")
    assert machine.claim("bb").state == "mine"
    assert "lease-1" in machine.generations()


def test_an_owner_with_an_awkward_name_is_only_text(machine: Machine, tmp_path: Path) -> None:
    awkward = f"$(touch {tmp_path}/x) `id` '\" \\ \n é\x1b[2J"
    machine.ask(lease.claim(holder("aa", awkward), HOUR_S, directory=str(machine.directory)))
    assert machine.show().holder == holder("aa", awkward)
    forged = '","token":"bb'
    machine.release("aa")
    machine.ask(lease.claim(holder("cc", forged), HOUR_S, directory=str(machine.directory)))
    assert machine.show("bb").state == "held"
    assert not (tmp_path / "x").exists()


def test_old_generations_are_swept(machine: Machine) -> None:
    for number in range(6):
        machine.claim(f"a{number}", 1)
        machine.await_expiry()
        while machine.show().state != "free":
            time.sleep(0.05)
    assert machine.generations() == ["lease-5", "lease-6"]
    machine.claim("bb")
    machine.release("bb")
    assert machine.generations() == []


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_where_nothing_can_be_written(machine: Machine) -> None:
    machine.directory.mkdir(mode=0o555)
    broken = machine.claim("aa")
    assert broken.state == "broken"
    assert str(machine.directory) in broken.error


def test_a_directory_that_another_account_is_just_making_is_waited_for() -> None:
    """mkdir gives it its mode, and thus all accounts the permission, a moment after its name."""
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o755)  # for the other account
        directory = Path(parent) / "leases"
        directory.mkdir(mode=0o555)
        line = lease.claim(holder("aa"), HOUR_S, directory=str(directory))
        nobody = 65534 if os.getuid() == 0 else None
        with subprocess.Popen(["sh", "-c", line], stdout=subprocess.PIPE, user=nobody) as claim:
            time.sleep(0.3)
            directory.chmod(0o1777)
            output = claim.communicate(timeout=60)[0]
    assert lease.parse(output.decode()).state == "mine"


def test_where_the_directory_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    broken = Machine(tmp_path / "file" / "leases").claim("aa")
    assert (broken.state, broken.error) == ("broken", f"cannot make {tmp_path}/file/leases")


@pytest.mark.parametrize("before", ["nothing", "released", "expired", "half-made"])
def test_of_many_who_race_exactly_one_wins(machine: Machine, before: str) -> None:
    machine.directory.mkdir(mode=0o1777)
    if before == "released":
        machine.claim("old")
        machine.release("old")
    elif before == "expired":
        machine.claim("old", 0)
    elif before == "half-made":
        (machine.directory / "lease-1").mkdir()
    for round_number in range(5):
        tokens = [f"{round_number}-{racer}" for racer in range(8)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(machine.claim, tokens))
        winners = [token for token, got in zip(tokens, found, strict=True) if got.state == "mine"]
        assert len(winners) == 1
        assert machine.show(winners[0]).state == "mine"
        told = {got.holder.token for got in found if got.holder}
        assert told == set(winners)
        machine.release(winners[0])


def test_a_late_renewal_and_a_take_over_never_both_succeed(machine: Machine) -> None:
    """At the moment of expiry one renews and three take over: never two who hold it."""
    for number in range(4):
        mine = f"mine-{number}"
        # A second may be over as soon as it has begun.
        assert machine.claim(mine, 2).state == "mine"
        machine.await_expiry()
        with ThreadPoolExecutor(4) as pool:
            renewed = pool.submit(machine.renew, mine)
            others = list(pool.map(machine.claim, [f"{number}-{each}" for each in "abc"]))
        holding = [got for got in (renewed.result(), *others) if got.state == "mine"]
        assert len(holding) <= 1
        for got in holding:
            assert got.holder is not None
            assert machine.release(got.holder.token).state == "free"
        machine.release(mine)


def test_a_lease_below_a_half_made_one_is_still_held(machine: Machine) -> None:
    """Somebody slow made a directory above a lease that was renewed late, and will give way."""
    assert machine.claim("aa").state == "mine"
    (machine.directory / "lease-2").mkdir()
    assert machine.claim("bb").state == "held"
    assert machine.generations() == ["lease-1", "lease-2"]
    (machine.directory / "lease-2").rmdir()
    assert machine.show("aa").state == "mine"


def test_the_same_token_at_the_same_time_is_one_claim(machine: Machine) -> None:
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(machine.claim, ["aa"] * 6))
    assert {got.state for got in found} == {"mine"}
    assert machine.generations() == ["lease-1"]


@pytest.mark.parametrize("order", [(Machine, EarlierLabctl), (EarlierLabctl, Machine)])
def test_earlier_and_later_labctls_honour_each_other(
    tmp_path: Path, order: tuple[type[Machine], type[Machine]]
) -> None:
    one, other = (kind(tmp_path / "leases") for kind in order)
    assert one.claim("aa", 100).state == "mine"
    assert other.show("aa").holder == other.claim("bb").holder == holder("aa")
    assert other.claim("bb").state == "held"
    assert other.renew("aa", 500).state == "mine"
    assert 460 <= one.show("aa").left_s <= 500
    assert other.release("aa").state == "free"
    assert one.show("aa").state == "free"
    assert other.claim("bb").state == "mine"
    assert one.claim("aa").holder == holder("bb")


def test_of_earlier_and_later_labctls_that_race_at_most_one_wins(machine: Machine) -> None:
    """An earlier one takes no lock, so that both may give way."""
    earlier = EarlierLabctl(machine.directory)
    for number in range(8):
        with ThreadPoolExecutor(6) as pool:
            claims = [
                pool.submit(kind.claim, f"{number}-{each}")
                for each, kind in enumerate([machine, earlier] * 3)
            ]
        winners = [claim.result() for claim in claims if claim.result().state == "mine"]
        assert len(winners) <= 1
        for winner in winners:
            assert winner.holder is not None
            assert machine.show().holder == earlier.show().holder == winner.holder
            assert machine.release(winner.holder.token).state == "free"


def test_a_claim_waits_while_another_labctl_changes_leases(machine: Machine) -> None:
    machine.directory.mkdir(mode=0o1777)
    inode = f":{machine.directory.stat().st_ino} "
    other = os.open(machine.directory, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as pool:
        claim = pool.submit(machine.claim, "aa")
        while not any(
            "-> FLOCK" in line and inode in line
            for line in Path("/proc/locks").read_text().splitlines()
        ):
            assert not claim.done()
            time.sleep(0.005)
        assert machine.generations() == []
        os.close(other)
        assert claim.result().state == "mine"


def test_a_machine_without_flock_keeps_no_lease(machine: Machine, tmp_path: Path) -> None:
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in ("cat", "id", "mkdir", "sh", "stat", "timeout"):
        found = shutil.which(name)
        assert found is not None
        (commands / name).symlink_to(found)
    claimed = machine.ask(
        f"PATH={commands}\n" + lease.claim(holder("aa"), HOUR_S, directory=str(machine.directory))
    )
    assert claimed.state == "broken"
    assert "flock" in claimed.error
    assert machine.generations() == []


def test_what_makes_no_sense_is_told() -> None:
    with pytest.raises(ProviderError, match="cannot be read") as caught:
        lease.parse("\x1b[2J welcome")
    assert "\x1b" not in caught.value.why


def test_gpus_of_the_machine() -> None:
    said = (
        "state free\nleft 0\nowner \n"
        "gpu GPU-1, 15360, 550.54, Tesla T4\ngpu No devices were found\n"
    )
    [gpu] = lease.parse(said).gpus
    assert (gpu.name, gpu.uuid, gpu.memory_bytes) == ("Tesla T4", "GPU-1", 15 * 1024**3)
