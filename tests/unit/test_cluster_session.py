"""Which machines of a cluster answer, what they have, and what of it is missing."""

from __future__ import annotations

import pytest

from labctl.commands import cluster_accounts, slurm_nodes
from labctl.courses.cluster_session import ClusterSession, RunAsRoot, UidChoice
from labctl.errors import ConnectError, HostKeyError, LabError, PolicyError
from labctl.events import Event, Note, SilentReporter

PASSWD = """\
root:x:0:0:root:/root:/bin/bash
lab-ann:x:20000:20000::/srv/class/lab-ann:/bin/bash
lab-bob:x:20001:20001::/srv/class/lab-bob:/bin/bash
"""
# As Slurm 22.05 prints it.
STATES = """\
gpu1|idle|Unknown|none
gpu2|down*|slurm|Not responding
gpu3|drain*|root|disk | fan
gpu4|mix|Unknown|none
gpu5|idle*|Unknown|none
gpu6|unk*|Unknown|none
gpu7|drng|root|removed from course.yaml
gpu8|drain|slurm|Epilog error
"""


class Notes(SilentReporter):
    """Keeps what a person would read."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, Note):
            self.texts.append(event.text)


def print_machine(hostname: str, members: str) -> str:
    return f"--- host\n{hostname}\n--- groups\nlabctl:x:998:{members}\n--- accounts\n{PASSWD}"


def open_session(hostnames: dict[str, str], configured: str, states: str) -> ClusterSession:
    """A session with these machines and the accounts in their group; "" does not answer."""

    def make_opener(hostname: str, members: str) -> RunAsRoot:
        def run(script: str) -> str:
            if not members:
                raise ConnectError(f"{hostname} does not answer")
            if script == slurm_nodes.build_query():
                return f"{configured}\n--- states\n{states}"
            assert script == cluster_accounts.build_inspection()
            return print_machine(f"{hostname}.lab.example", members)

        return run

    session = ClusterSession("gpu1")
    for hostname, members in hostnames.items():
        session.add(hostname, lambda h=hostname, m=members: make_opener(h, m))  # type: ignore[misc]
    return session


def test_the_states_of_machines_say_which_have_joined() -> None:
    nodes = slurm_nodes.parse_nodes(f"gpu1\ngpu2\n--- states\n{STATES}")
    assert nodes.configured == {"gpu1", "gpu2"}
    joined = [name for name in nodes.states if nodes.has_joined(name)]
    assert joined == ["gpu1", "gpu3", "gpu4", "gpu7", "gpu8"], "of a drained one, staff are told"
    assert not nodes.has_joined("gpu9")
    assert slurm_nodes.parse_nodes("--- states\n") == slurm_nodes.ClusterNodes()
    assert [name for name in nodes.states if nodes.is_removed(name)] == ["gpu7"]
    assert nodes.unavailable == {
        "gpu2": slurm_nodes.NodeState("down*", "slurm", "Not responding"),
        "gpu3": slurm_nodes.NodeState("drain*", "root", "disk | fan"),
        "gpu6": slurm_nodes.NodeState("unk*", "Unknown", "none"),
        "gpu7": slurm_nodes.NodeState("drng", "root", "removed from course.yaml"),
        "gpu8": slurm_nodes.NodeState("drain", "slurm", "Epilog error"),
    }


def test_a_node_that_does_not_answer_is_recorded_and_the_controller_is_required() -> None:
    session = open_session({"gpu1": "lab-ann", "gpu2": ""}, "gpu1\ngpu2", "gpu1|idle||\n")
    assert list(session.roots) == ["gpu1"]
    assert list(session.failures) == ["gpu2"]
    assert not session.can_configure, "the configuration would lose gpu2"
    with pytest.raises(ConnectError):
        open_session({"gpu1": ""}, "", "")


def test_a_wrong_host_key_stops_everything() -> None:
    def refuse() -> RunAsRoot:
        raise HostKeyError("another key")

    with pytest.raises(HostKeyError):
        ClusterSession("gpu1").add("gpu2", refuse)


def test_what_a_machine_lacks_is_found_on_the_machine() -> None:
    members = {"gpu1": "lab-ann", "gpu2": "lab-ann,lab-bob"}
    session = open_session(members, "gpu1\ngpu2", "gpu1|idle||\ngpu2|unk*||\n")
    assert session.list_unjoined() == ["gpu2"]
    assert session.list_incomplete(["lab-ann"], []) == []
    assert session.list_incomplete(["lab-ann", "lab-bob"], []) == ["gpu1"]
    assert session.list_lingering(["lab-bob", "lab-cid"]) == ["lab-bob"]
    assert session.list_incomplete(["lab-ann"], ["lab-bob"]) == ["gpu2"]
    assert session.can_configure


def test_a_machine_that_left_course_yaml_is_known_only_if_all_others_answer() -> None:
    session = open_session({"gpu1": "lab-ann"}, "gpu1\ngpu2", "gpu1|idle||\ngpu2|idle||\n")
    assert session.removed_nodes == ["gpu2"]
    assert not session.can_configure, "jobs may run there"
    silent = open_session({"gpu1": "lab-ann", "gpu3": ""}, "gpu1\ngpu2", "gpu1|idle||\n")
    assert silent.removed_nodes == []


@pytest.mark.parametrize(("jobs", "drained"), [("0\n", {"gpu2"}), ("2\n", set())])
def test_a_machine_is_taken_out_when_no_jobs_run_there(jobs: str, drained: set[str]) -> None:
    session = open_session({"gpu1": "lab-ann"}, "gpu1\ngpu2", "gpu1|idle||\ngpu2|mix||\n")
    scripts: list[str] = []

    def drain(script: str) -> str:
        scripts.append(script)
        return jobs

    session.roots["gpu1"] = drain
    notes = Notes()
    session.drain_removed(notes)
    assert scripts[0].startswith("scontrol update nodename=gpu2 state=drain ")
    assert session.drained_nodes == drained
    assert session.can_configure == bool(drained)
    assert [("waits for 2 jobs to end" in text) for text in notes.texts] == [True] * (not drained)


def test_a_machine_that_is_back_in_course_yaml_takes_jobs_again() -> None:
    states = "gpu1|idle|Unknown|none\ngpu2|drain|root|removed from course.yaml\n"
    states += "gpu3|drain|root|disk\n"
    members = {"gpu1": "lab-ann", "gpu2": "lab-ann", "gpu3": "lab-ann"}
    session = open_session(members, "gpu1\ngpu2\ngpu3", states)
    scripts: list[str] = []
    session.roots["gpu1"] = lambda script: scripts.append(script) or ""  # type: ignore[func-returns-value]
    notes = Notes()
    session.resume_returned(notes)
    assert scripts == ["scontrol update nodename=gpu2 state=resume"]
    assert notes.texts == ["gpu2 is in hosts again, and takes jobs again"]


def test_nothing_is_said_of_joins_if_slurm_does_not_answer() -> None:
    session = open_session({"gpu1": "lab-ann", "gpu2": "lab-ann"}, "gpu1", "")
    assert session.list_unjoined() == []
    assert session.can_configure


def test_homes_that_are_not_shared_exclude_a_node() -> None:
    session = ClusterSession("gpu1")
    answers = {"gpu1": "/srv/class/.labctl-shared-x\n", "gpu2": "shared\n", "gpu3": "apart\n"}

    def make_root(name: str) -> RunAsRoot:
        def run(script: str) -> str:
            if script == cluster_accounts.build_inspection():
                return print_machine(name, "lab-ann")
            if "sinfo" in script:
                return ""
            if name == "gpu4" and "ls -a" in script:
                raise LabError("the file system does not answer")
            return answers.get(name, "")

        return run

    for name in (*answers, "gpu4"):
        session.add(name, lambda name=name: make_root(name))  # type: ignore[misc]
    session.check_homes("/srv/class")
    assert session.other_machines == ("gpu2",)
    assert session.failures["gpu3"].what == "/srv/class on gpu3 is not the /srv/class of gpu1"
    assert session.failures["gpu4"].what == "the file system does not answer"


class Machines:
    """A controller with these accounts and homes, and a directory service that lists nobody."""

    def __init__(self, hidden: dict[str, int], owners: str = "") -> None:
        self.hidden = hidden
        self.owners = owners

    def run(self, script: str) -> str:
        if script == cluster_accounts.build_inspection():
            return print_machine("gpu1", "lab-ann,lab-bob")
        if script.startswith("find /srv/class"):
            return self.owners
        if script.startswith("getent passwd "):
            keys = set(script.partition(";")[0].split()[2:])
            rows = [
                f"{name}:x:{uid}:{uid}::/home/{name}:/bin/sh"
                for name, uid in self.hidden.items()
                if {name, str(uid)} & keys
            ]
            return "\n".join(rows)
        return ""

    def open(self) -> ClusterSession:
        session = ClusterSession("gpu1")
        session.add("gpu1", lambda: self.run)
        return session


def test_a_new_account_gets_no_uid_of_a_directory_service_or_of_files() -> None:
    hidden = {f"ldap{uid}": uid for uid in range(20_002, 20_150)} | {"lab-dan": 5000}
    session = Machines(hidden, "20150 lab-old\n20151\n").open()
    choice = session.choose_uids(["lab-ann", "lab-cid", "lab-dan"], "/srv/class")
    assert choice == UidChoice({"lab-ann": 20_000, "lab-cid": 20_152, "lab-dan": 5000})


def test_a_home_that_another_account_left_is_refused() -> None:
    session = Machines({}, "20007 lab-cid\n0 lab-dan\n20007\n").open()
    # A directory that staff have made, and an account that the machines still have, are fine.
    choice = session.choose_uids(["lab-cid", "lab-dan", "lab-bob"], "/srv/class")
    assert choice.uids == {"lab-bob": 20_001, "lab-dan": 20_002}
    (refusal,) = choice.errors.values()
    assert refusal.what == "/srv/class/lab-cid exists, and no machine has an account lab-cid"
    assert "uid 20007" in refusal.why


def open_conflicting(states: str) -> ClusterSession:
    """Machines of which gpu2 has another uid for lab-ann, and another account with lab-bob's."""
    passwd = {
        "gpu1": PASSWD,
        "gpu2": PASSWD.replace("lab-bob", "staff").replace("20000:20000", "3000:3000"),
        "gpu3": PASSWD,
    }
    session = ClusterSession("gpu1")

    def make_root(name: str) -> RunAsRoot:
        def run(script: str) -> str:
            if script == cluster_accounts.build_inspection():
                return print_machine(name, "lab-ann").replace(PASSWD, passwd[name])
            if script == slurm_nodes.build_query():
                return f"gpu1\ngpu2\ngpu3\n--- states\n{states}"
            return ""

        return run

    for name in passwd:
        session.add(name, lambda name=name: make_root(name))  # type: ignore[misc]
    return session


def test_an_account_without_a_common_uid_stops_no_other() -> None:
    states = "gpu1|idle|Unknown|none\ngpu2|idle|Unknown|none\ngpu3|idle|Unknown|none\n"
    session = open_conflicting(states)
    names = ["lab-ann", "lab-bob", "lab-cid"]
    choice = session.choose_uids(names, "/srv/class")
    assert choice.uids == {"lab-cid": 20_002}
    assert choice.machines == {"lab-ann": "gpu2", "lab-bob": "gpu2"}
    assert "uid 20000 on gpu1, and 3000 on gpu2" in choice.errors["lab-ann"].why
    assert "which staff has on gpu2" in choice.errors["lab-bob"].why
    assert choice.errors["lab-bob"].hint == "usermod --uid UID staff   # on gpu2\nlabctl course up"
    # Jobs run on gpu2 already: it stays, and the choice says so.
    assert session.set_aside_conflicting(names, "/srv/class").machines == choice.machines
    assert session.other_machines == ("gpu2", "gpu3")
    notes = Notes()
    session.report_conflicts(notes, choice)
    assert len(notes.texts) == 2
    assert "next: usermod --uid UID lab-ann\n        (on gpu2)" in notes.texts[0]


def test_a_machine_on_which_accounts_have_another_uid_does_not_join() -> None:
    session = open_conflicting("gpu1|idle|Unknown|none\ngpu3|idle|Unknown|none\n")
    choice = session.set_aside_conflicting(["lab-ann", "lab-bob"], "/srv/class")
    assert choice == UidChoice({"lab-ann": 20_000, "lab-bob": 20_001})
    assert session.other_machines == ("gpu3",)
    assert session.failures["gpu2"].what.startswith("lab-ann cannot have the same uid on gpu1")


def test_a_machine_that_was_never_prepared_has_no_accounts_to_end() -> None:
    states = "gpu1|idle|Unknown|none\n"
    session = open_session(
        {"gpu1": "lab-ann", "gpu2": "lab-ann", "gpu3": "lab-ann"}, "gpu1", states
    )
    bare = f"--- host\ngpu2\n--- groups\n--- accounts\n{PASSWD}"
    session.machines["gpu2"] = cluster_accounts.parse_inspection(bare)
    assert session.is_controller_prepared
    notes = Notes()
    session.skip_unprepared(notes)
    assert session.other_machines == ("gpu3",)
    assert not session.failures, "nothing remains to be done there"
    assert notes.texts[0].startswith("gpu2 was left out: it has never been prepared")


def test_homes_cannot_change_while_accounts_have_files_there() -> None:
    session = Machines({}).open()
    session.require_homes(["lab-ann", "lab-new"], "/srv/class")
    with pytest.raises(PolicyError) as refusal:
        session.require_homes(["lab-new", "lab-ann"], "/data/class")
    message = "shared.homes in course.yaml is /data/class, and the home of lab-ann is in /srv/class"
    assert refusal.value.what == message
    # One that is not of the course yet is left out alone.
    choice = session.choose_uids(["lab-ann", "lab-new"], "/data/class")
    assert choice.uids == {"lab-new": 20_002}
    assert choice.errors["lab-ann"].what == message
