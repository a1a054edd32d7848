"""kill -9 of `labctl up`, at every effect and at random: never two servers, and an end to all."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from aws_bed import DOWN, MADE, ORPHANS, SSH_DEADLINE, TAKEN, UP, AwsLab, Bed
from lab_servers import wait_for
from warm_labctl import Command

pytest_plugins = ["aws_fixtures"]

POLL_S = 0.002


def test_every_effect_in_the_cloud_is_in_the_list(bed: Bed) -> None:
    lab = bed.lab()
    with bed.changes() as made:
        lab.labctl(*UP, code=75, settings={SSH_DEADLINE: 0.1})
    assert made == dict.fromkeys((*MADE, *TAKEN), 1)


# Of each kind of effect one that costs money, or that another one needs; all of them with --long.
SOME_MADE = [
    action
    if action in ("CreateSecurityGroup", "RunInstances", "CreateSchedule")
    else pytest.param(action, marks=pytest.mark.long)
    for action in MADE
]


@pytest.mark.parametrize("action", SOME_MADE)
@pytest.mark.parametrize("kind", [pytest.param("dropped", marks=pytest.mark.long), "lost"])
def test_up_goes_on(bed: Bed, kind: str, action: str) -> None:
    lab = bed.lab()
    bed.killed_at(lab, UP, kind, action)
    lab.up_until_ssh()
    assert len(bed.living()) == 1
    lab.forget()
    lab.labctl(*ORPHANS)


@pytest.mark.parametrize("action", SOME_MADE)
@pytest.mark.parametrize("kind", [pytest.param("dropped", marks=pytest.mark.long), "lost"])
def test_down_ends_it(bed: Bed, kind: str, action: str) -> None:
    """A call that was dropped left in AWS what the one before it left, as for the orphans."""
    lab = bed.lab()
    bed.killed_at(lab, UP, kind, action)
    lab.labctl(*DOWN)


@pytest.mark.parametrize("action", SOME_MADE)
def test_orphans_end_it(bed: Bed, action: str) -> None:
    """Before a call, AWS has what it had after the one before: there is nothing else to know."""
    lab = bed.lab()
    bed.killed_at(lab, UP, "lost", action)
    lab.forget()
    lab.labctl(*ORPHANS)


@pytest.mark.long
@pytest.mark.parametrize("first", range(6))
def test_before_each_effect_on_this_machine(bed: Bed, tmp_path: Path, first: int) -> None:
    """Once there is a server, a kill costs seconds, so only --long tries it."""
    # The first one writes down for all others what AWS offers.
    for file in (tmp_path / "first", tmp_path / "trace"):
        lab = bed.lab()
        lab.up_until_ssh(trace=file)
        lab.labctl(*DOWN)
    effects = (tmp_path / "trace").read_text().splitlines()
    made = effects.index("INSERT INTO servers")
    assert "INSERT INTO attempts" in effects[:made]
    lab = bed.lab()
    for effect in effects[:made]:
        # What came before it is written already: the lab goes on from kill to kill.
        lab.killed_before(effect, tmp_path)
        assert not bed.living(), effect
    lab.labctl(*DOWN)
    for number, effect in enumerate(effects[made + first :: 6]):
        lab = bed.lab()
        lab.killed_before(effect, tmp_path)
        assert len(bed.living()) == 1, effect
        if number % 2:
            lab.up_until_ssh()
            assert len(bed.living()) == 1, effect
        lab.labctl(*DOWN)
        assert bed.left() == [], effect


@pytest.mark.long
def test_at_random_moments(bed: Bed) -> None:
    """LABCTL_KILLS says how often. Whatever came of it, one command ends it all."""
    kills, seed = int(os.environ.get("LABCTL_KILLS", "8")), random.randrange(10**6)
    dice = random.Random(seed)
    labs = (bed.lab(), bed.lab())
    # The first one writes down for both what AWS offers.
    labs[0].up_until_ssh()
    whole_s, making_s = durations(bed, labs[1])
    labs[0].labctl(*ORPHANS)
    reached: Counter[str] = Counter()
    for number in range(kills):
        lab = labs[number % 2]
        # Three of four while something is being made; the rest at any moment.
        making = dice.random() < 0.75
        delay_s = dice.uniform(0, making_s if making else whole_s)
        reached[killed_after(bed, lab, delay_s, making=making)] += 1
        if number % 2:
            lab.labctl(*DOWN)
        else:
            lab.forget()
            lab.labctl(*ORPHANS)
        assert bed.left() == [], f"kill {number} of seed {seed}"
    print(f"seed {seed}, {kills} kills, by the last change in the cloud: {dict(reached)}")


def durations(bed: Bed, lab: AwsLab) -> tuple[float, float]:
    """Seconds of an `up` until it waits for a login, altogether and from its first change on."""
    began = time.monotonic()
    described = lab.home / ".ssh" / "config"
    command = lab.start(*UP)
    first = changed(bed, command)
    while not described.exists():
        time.sleep(POLL_S)
    ended = time.monotonic()
    command.kill()
    command.wait()
    return ended - began, ended - first


def changed(bed: Bed, command: Command) -> float:
    """When a command made its first change in the cloud, or ended."""
    before = changes_so_far(bed)
    while changes_so_far(bed) == before and not command.done.is_set():
        time.sleep(POLL_S)
    return time.monotonic()


def changes_so_far(bed: Bed) -> int:
    calls = bed.rehearsal.calls
    return sum(calls.get(action, 0) for action in MADE)


def killed_after(bed: Bed, lab: AwsLab, delay_s: float, *, making: bool) -> str:
    """kill -9 of `up` so long after its beginning or first change; the last change that it made."""
    with bed.changes() as made:
        command = lab.start(*UP)
        if making:
            changed(bed, command)
        command.done.wait(delay_s)
        command.kill()
        assert command.wait() == -signal.SIGKILL, command.said
        wait_for(lambda: not bed.rehearsal.under_way)
    return next((action for action in reversed(MADE) if made[action]), "none")
