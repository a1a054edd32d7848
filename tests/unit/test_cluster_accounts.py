"""The uids of a class's accounts on machines that share their homes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from labctl.commands.cluster_accounts import (
    FIRST_UID,
    LAST_UID,
    UidConflict,
    build_owner_query,
    choose_uids,
    list_candidates,
    parse_owners,
    parse_uids,
)
from labctl.courses.class_cluster import choose_gpus, shorten_machine_name
from labctl.errors import PolicyError
from labctl.model import Offer

PASSWD = """\
root:x:0:0:root:/root:/bin/bash
staff:x:1000:1000::/home/staff:/bin/bash
lab-ann:x:20000:20000::/srv/class/lab-ann:/bin/bash
"""


def test_accounts_are_read_from_what_getent_prints() -> None:
    uids = parse_uids(PASSWD + "broken\n+nis::::::\n")
    assert uids == {"root": 0, "staff": 1000, "lab-ann": 20_000}


def test_a_new_account_gets_a_number_that_is_free_everywhere() -> None:
    machines = {"gpu1": {"root": 0, "ldap": 20_000}, "gpu2": {"root": 0, "other": 20_001}}
    free = list_candidates({0, 20_000, 20_001, 20_003}, 2, 2)
    assert choose_uids(["lab-bob", "lab-ann"], machines, free) == (
        {"lab-ann": 20_002, "lab-bob": 20_004},
        [],
    )


def test_numbers_that_are_used_up_are_an_error() -> None:
    with pytest.raises(PolicyError, match="are free, and new accounts need 2"):
        list_candidates(set(range(FIRST_UID, LAST_UID)), 2, 100)


def test_owners_are_read_from_what_find_prints(tmp_path: Path) -> None:
    for name, uid in (("lab ann", 20_000), ("lab-bob", 20_001)):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "file").write_text("x")
        os.chown(tmp_path / name, uid, uid)
    os.chown(tmp_path / "lab-bob" / "file", 20_005, 20_005)
    script = build_owner_query(str(tmp_path))
    output = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    owners = parse_owners(output)
    assert owners.uids == {"lab ann": 20_000, "lab-bob": 20_001}
    assert owners.all_uids == {0, 20_000, 20_001, 20_005}


def test_an_account_keeps_its_number_on_a_machine_that_joins() -> None:
    machines = {"gpu1": {"lab-ann": 1001}, "gpu2": {"staff": 1000}}
    assert choose_uids(["lab-ann"], machines, []) == ({"lab-ann": 1001}, [])
    everywhere = {"gpu1": {"lab-ann": 1001}, "gpu2": {"lab-ann": 1001}}
    assert choose_uids(["lab-ann"], everywhere, []) == ({"lab-ann": 1001}, [])


def test_two_numbers_of_an_account_or_two_accounts_of_a_number_are_a_conflict() -> None:
    twice = {"gpu1": {"lab-ann": 1001}, "gpu2": {"lab-ann": 1002}}
    conflict = UidConflict("lab-ann", ("gpu1", "gpu2"), (1001, 1002))
    assert choose_uids(["lab-ann"], twice, []) == ({}, [conflict])
    held = {"gpu1": {"lab-ann": 1001}, "gpu2": {"staff": 1001}}
    conflict = UidConflict("lab-ann", ("gpu1", "gpu2"), (1001, 1001), "staff")
    assert choose_uids(["lab-ann"], held, []) == ({}, [conflict])


def test_a_job_gets_a_gpu_also_if_the_controller_has_none() -> None:
    controller, node = Offer("static", "gpu1"), Offer("static", "gpu2", gpu_name="T4", gpu_count=2)
    chosen = choose_gpus(controller, [node])
    assert (chosen.type, chosen.gpu_name, chosen.gpu_count) == ("gpu1", "T4", 2)
    assert choose_gpus(controller, []) == controller


def test_machines_whose_names_begin_alike_have_labs_of_their_own() -> None:
    assert shorten_machine_name("gpu2.lab.example") == "gpu2-lab-example"
    names = [f"gpu-machine-number-{number}.lab.example" for number in range(100)]
    short = {shorten_machine_name(name) for name in names}
    assert len(short) == len(names)
    assert max(map(len, short)) <= 20
