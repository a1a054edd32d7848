"""course on the command line: what an instructor types, sees and reads in scripts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labctl.commands.slurm_accounting import ClassUser
from labctl.commands.slurm_jobs import ClassJobs
from labctl.courses.records.gpu_minutes import record_gpu_minutes
from labctl.model import Offer
from labctl.providers.local import LocalProvider

# What was said: `code`, `out`, `err`.
Said = Any
Labctl = Callable[..., Said]

CANVAS = """Student,ID,SIS User ID,SIS Login ID,Section,hw3 (103)
    Points Possible,,,,,100
"Lovelace, Ada",11,s001,ada@uni.edu,Lab A,
"Babbage, Charles",12,s002,charles,Lab B,
"Student, Test",99,,0a1b,Lab A,
"""
KEYS = """
hours: [{days: [mon], from: "10:00", to: "12:00", zone: UTC}]
term: {from: 2026-09-01, to: 2099-01-31}
assignments:
  hw3: {due: "2098-11-28 23:59 UTC", late: 48h, penalty: 10, points: 100}
"""


@pytest.fixture
def canvas(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(home)
    (home / "canvas.csv").write_text(CANVAS, encoding="utf-8-sig")
    return home / "canvas.csv"


@pytest.fixture
def course(labctl: Labctl, canvas: Path) -> Path:
    """A course of two, with an assignment."""
    assert labctl("course", "init", "ml", "--roster", str(canvas)).code == 0
    with (canvas.parent / "ml" / "course.yaml").open("a") as file:
        file.write(KEYS)
    return canvas.parent / "ml"


def in_course(labctl: Labctl, *words: str) -> Said:
    return labctl("-C", "ml", "course", *words)


def read(said: Said) -> dict[str, Any]:
    assert said.code == 0, said.err
    found: dict[str, Any] = json.loads(said.out)
    assert found["version"] == 1
    return found


def test_a_course_is_made_from_an_export_and_made_again_without_a_change(
    labctl: Labctl, canvas: Path
) -> None:
    said = labctl("course", "init", "ml", "--roster", "canvas.csv", "--json")
    found = read(said)
    assert (found["made"], found["format"]) == (True, "canvas")
    assert [(one["id"], one["name"], one["section"]) for one in found["students"]] == [
        ("ada", "Ada Lovelace", "Lab A"),
        ("charles", "Charles Babbage", "Lab B"),
    ]
    folder = canvas.parent / "ml"
    modes = {name: (folder / name).stat().st_mode & 0o777 for name in (".course", "roster.csv")}
    assert modes == {".course": 0o700, "roster.csv": 0o600}
    (kept,) = (folder / "imported").iterdir()
    assert kept.read_bytes() == canvas.read_bytes()
    before = (folder / ".course" / "course.json").read_bytes()
    again = read(labctl("course", "init", "ml", "--roster", "canvas.csv", "--json"))
    assert (again["made"], again["diff"]["same"]) == (False, 2)
    assert (folder / ".course" / "course.json").read_bytes() == before
    assert len(list((folder / "imported").iterdir())) == 1


def test_a_bad_roster_names_every_line_and_makes_nothing(labctl: Labctl, canvas: Path) -> None:
    bad = canvas.parent / "bad.csv"
    bad.write_bytes(
        "\ufeffid,name\r\n-oProxyCommand=x,Eve\r\nbob,Bob\r\nbob,B\r\n\x1b[2J,C\r\n".encode()
    )
    said = labctl("course", "init", "new", "--roster", "bad.csv")
    assert said.code == 2
    assert [line.split(":")[0].strip() for line in said.err.splitlines()[1:4]] == [
        "line 2",
        "line 4",
        "line 5",
    ]
    assert "\x1b[2J" not in said.err
    assert not (canvas.parent / "new").exists()


def test_a_directory_that_is_something_else_is_left_alone(labctl: Labctl, canvas: Path) -> None:
    said = labctl("course", "init", "digits", "--roster", "canvas.csv")
    assert said.code == 3
    assert "labctl course init digits-2 --roster canvas.csv" in said.err
    assert labctl("course", "init", "My Course", "--roster", "canvas.csv").code == 2


def test_who_left_is_asked_for_and_never_dropped(labctl: Labctl, course: Path) -> None:
    shorter = CANVAS.replace('"Babbage, Charles",12,s002,charles,Lab B,\n', "")
    (course.parent / "week-2.csv").write_text(shorter)
    refused = in_course(labctl, "roster", "week-2.csv")
    assert refused.code == 3
    assert "charles" in refused.err
    dry = read(in_course(labctl, "roster", "week-2.csv", "--dry-run", "--json"))
    assert (dry["changed"], dry["diff"]["left"]) == (False, ["charles"])
    kept = read(in_course(labctl, "roster", "week-2.csv", "--keep", "--json"))
    assert kept["diff"]["left"] == []
    assert in_course(labctl, "roster", "week-2.csv", "--yes").code == 0
    found = read(in_course(labctl, "roster", "--json"))
    assert {one["id"]: one["active"] for one in found["students"]} == {
        "ada": True,
        "charles": False,
    }
    assert [one["name"] for one in found["seats"]] == ["ada"]
    assert "Ada" not in json.dumps(found["seats"])


def test_a_plan_is_a_diff_against_the_last_one(labctl: Labctl, course: Path) -> None:
    first = read(in_course(labctl, "plan", "--offline", "--json"))["plan"]
    assert first["first"]
    assert first["to_make"] == ["ada", "charles"]
    path = course / "course.yaml"
    path.write_text(path.read_text().replace("ttl: 8h", "ttl: 6h", 1))
    said = in_course(labctl, "plan", "--offline")
    assert "~ per_student.ttl: 8h -> 6h" in said.out
    assert "to create: 2 seats" in said.out
    assert "per_student.ttl" not in in_course(labctl, "plan", "--offline").out
    path.write_text(path.read_text().replace("ttl: 6h", "ttl: 6 hours", 1))
    wrong = in_course(labctl, "plan", "--offline")
    assert wrong.code == 2
    assert "per_student.ttl" in wrong.err


def test_the_plan_calls_what_costs_nothing_free(
    labctl: Labctl, course: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = Offer(provider="local", type="container", price_usd_per_hour=0.0)
    monkeypatch.setattr(LocalProvider, "offers", lambda self, need: [offer])
    out = in_course(labctl, "plan").out
    assert "local container: free\n" in out
    assert "$0.00" not in out
    assert "every budget is spent" not in out


def test_a_budget_is_given_with_who_and_why(labctl: Labctl, course: Path) -> None:
    assert "$20.00 -> $25.00" in in_course(labctl, "budget", "ada", "+5", "--why", "ill").out
    assert "$25.00 -> $23.50" in in_course(labctl, "budget", "ada", "-1.5").out
    assert "$23.50 -> $30.00" in in_course(labctl, "budget", "ada", "30").out
    same = read(in_course(labctl, "budget", "ada", "30", "--json"))
    assert same["changed"]["after_usd"] == 30.0
    lines = [
        json.loads(one) for one in (course / ".course" / "ledger.jsonl").read_text().splitlines()
    ]
    given = [one for one in lines if one["kind"] == "budget"]
    assert [one["detail"]["usd"] for one in given] == [5.0, -1.5, 6.5]
    assert given[0]["why"] == "ill"
    assert given[0]["by"]
    assert in_course(labctl, "budget", "ada", "lots").code == 2
    refused = in_course(labctl, "budget", "ada", "-99")
    assert refused.code == 3
    assert "it is $30.00 now, which is less than $99.00\n" in refused.err
    assert "next: labctl course budget ada 0\n" in refused.err
    unknown = in_course(labctl, "budget", "adda", "+5")
    assert unknown.code == 4
    assert "did you mean ada?" in unknown.err


def test_the_usage_of_budget_shows_that_both_words_are_optional(labctl: Labctl) -> None:
    assert "[STUDENT] [AMOUNT]" in labctl("course", "budget", "--help").out


def test_a_due_time_is_moved_from_the_due_time_and_back(labctl: Labctl, course: Path) -> None:
    for _ in range(2):
        said = in_course(labctl, "due", "hw3", "ada", "+3d", "--why", "ill", "--json")
        due = read(said)["due"]
        assert due["seconds"] == 3 * 86_400
        assert due["closes_at"] - due["due"]["at"] == 48 * 3600
    said = in_course(labctl, "due")
    assert said.out.splitlines()[1].split()[:4] == ["hw3", "ada", "+3", "d"]
    assert said.out.rstrip().endswith("ill")
    for granted, shown in (("+1d", ["+1", "d"]), ("+36h", ["+36", "h"])):
        in_course(labctl, "due", "hw3", "ada", granted)
        assert in_course(labctl, "due").out.splitlines()[1].split()[2:4] == shown
    in_course(labctl, "due", "hw3", "ada", "+3d", "--why", "ill")
    (extension,) = read(in_course(labctl, "due", "hw3", "--json"))["extensions"]
    assert (extension["student"], extension["seconds"], extension["why"]) == ("ada", 259_200, "ill")
    assert read(in_course(labctl, "due", "hw3", "ada", "0", "--json"))["due"]["seconds"] == 0
    assert in_course(labctl, "due").out == "No student has an extension.\n"
    assert in_course(labctl, "due", "hw9").code == 4
    assert in_course(labctl, "due", "hw3", "ada").code == 2
    lines = (course / ".course" / "ledger.jsonl").read_text().splitlines()
    assert sum('"kind":"due"' in one for one in lines) == 5
    assert in_course(labctl, "due", "hw9", "ada", "+3d").code == 4
    assert in_course(labctl, "due", "hw3", "nobody", "+3d").code == 4
    assert in_course(labctl, "due", "hw3", "ada", "soon").code == 2


DUE_IN_BERLIN = """
assignments:
  hw3: {due: "2098-11-28 23:59 Europe/Berlin", late: 48h, penalty: 10}
  hw4: {due: "2098-12-05 22:59 UTC", grace: none}
"""


def test_a_program_that_reads_a_plan_gets_whole_lines(
    labctl: Labctl, canvas: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert labctl("course", "init", "ml", "--roster", str(canvas)).code == 0
    with (canvas.parent / "ml" / "course.yaml").open("a") as file:
        file.write(DUE_IN_BERLIN)
    monkeypatch.setenv("COLUMNS", "80")
    rules = [
        line for line in in_course(labctl, "plan", "--offline").out.splitlines() if "hw3" in line
    ]
    assert rules[0].endswith("accepted for 2 d, -10% a day"), rules


def test_due_times_are_in_the_courses_zone_with_their_grace_period(
    labctl: Labctl, canvas: Path
) -> None:
    assert labctl("course", "init", "ml", "--roster", str(canvas)).code == 0
    with (canvas.parent / "ml" / "course.yaml").open("a") as file:
        file.write(DUE_IN_BERLIN)
    plan = " ".join(in_course(labctl, "plan", "--offline").out.split())
    assert "hw3: due Fri 28 Nov 2098 23:59 Europe/Berlin; grace period 10 min" in plan
    assert "accepted for 2 d, -10% a day" in plan
    assert "hw4: due Fri 05 Dec 2098 23:59 Europe/Berlin; later is not accepted" in plan
    said = in_course(labctl, "due", "hw4", "ada", "+1d").out
    assert "on Sat 06 Dec 2098 23:59 Europe/Berlin" in said


def test_a_section_of_canvas_is_chosen_by_either_of_its_names(labctl: Labctl, home: Path) -> None:
    two = CANVAS.replace("Lab A", "L01 and Lab A").replace("Lab B", '"L01, Lab B, and Evening"')
    (home / "two.csv").write_text(two)
    assert (
        labctl("-C", str(home), "course", "init", "ml", "--roster", str(home / "two.csv")).code == 0
    )

    def seats(group: str) -> list[str]:
        said = labctl("-C", str(home / "ml"), "course", "status", "--json", "--group", group)
        return [one["seat"] for one in read(said)["seats"]]

    assert seats("L01") == ["ada", "charles"]
    assert seats("Lab A") == ["ada"]
    assert seats("Evening") == ["charles"]
    wrong = labctl("-C", str(home / "ml"), "course", "status", "--group", "Lab C")
    assert "the sections are Evening, L01, Lab A, Lab B" in wrong.err


def test_one_seat_is_not_one_seats(labctl: Labctl, home: Path) -> None:
    (home / "one.csv").write_text("id,name\nada,Ada\n")
    folder = str(home / "ml")
    created = labctl("-C", str(home), "course", "init", "ml", "--roster", str(home / "one.csv"))
    assert "1 student from csv" in created.out
    assert "1 student, 1 seat\n" in labctl("-C", folder, "course", "plan", "--offline").out
    assert "0 of 1 seat has a server" in labctl("-C", folder, "course", "status").out
    assert "1 seat without cost" in labctl("-C", folder, "course", "cost").out


def test_the_ledger_names_the_person_who_did_it(
    labctl: Labctl, course: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labctl.config.directories.find_user_name", lambda: "root")
    monkeypatch.setenv("SUDO_USER", "grace")
    assert in_course(labctl, "budget", "ada", "+5").code == 0
    assert labctl("-C", "ml", "course", "--as", "Ann TA", "budget", "ada", "+5").code == 0
    assert labctl("-C", "ml", "course", "--as", "ann", "due", "hw3", "ada", "+3d").code == 0
    assert labctl("-C", "ml", "course", "--as", "a\x1b[2J", "budget", "ada", "+5").code == 2
    lines = (course / ".course" / "ledger.jsonl").read_text().splitlines()
    entries = [json.loads(one) for one in lines]
    by = [one["by"] for one in entries if one["kind"] in ("budget", "due")]
    assert by == ["grace", "Ann TA", "ann"]


def test_a_class_with_slurm_is_planned_and_its_gpu_minutes_are_shown(
    labctl: Labctl, course: Path
) -> None:
    refused = in_course(labctl, "status", "--jobs")
    assert (refused.code, "this course has no jobs" in refused.err) == (2, True)
    file = course / "course.yaml"
    file.write_text(
        "course: ml\nserver: {provider: static, static: {hosts: [gpu1.lab.example]}}\n"
        "shared: {engine: slurm, gpus: 2, gpu_minutes: 1200, wall: 2h}\n"
    )
    plan = in_course(labctl, "plan", "--offline").out
    assert "one server in all, shared: 2 accounts each" in plan
    limits = "2 GPUs at a time, jobs of at most 2h, 1,200 GPU minutes in all"
    assert f"Slurm gives each account {limits}" in plan
    assert "no store" not in plan  # it would be refused
    jobs = ClassJobs(completed=7, out_of_memory=2, gpu_hours=0.54, median_wait_s=240)
    users = [ClassUser("lab-ada", used_minutes=31)]
    record_gpu_minutes(course / ".course", users, {"lab-ada": jobs})
    for command in ("status", "cost"):
        rows = [line for line in in_course(labctl, command).out.splitlines() if " of 1200" in line]
        assert [("31 of 1200" in row, row.split()[0]) for row in rows] == [
            *((True, "ada"), (False, "charles"))
        ]
    seats = read(in_course(labctl, "status", "--json"))["seats"]
    assert [seat["gpu_minutes"]["used"] for seat in seats] == [31, 0]
    assert [seat["gpu_minutes"]["jobs"]["completed"] for seat in seats] == [7, 0]
    rows = in_course(labctl, "status", "--jobs").out.splitlines()[-3:]
    assert [row.split() for row in rows] == [
        ["SEAT", "GPU", "HOURS", "DONE", "MEMORY", "WAIT", "LAST", "END"],
        ["ada", "0.5", "7", "2", "4", "min", "-"],
        ["charles", "0.0", *"----"],
    ]
    head, ada, _ = in_course(labctl, "cost", "--csv").out.splitlines()
    assert head.endswith(",seat_gpu_minutes")
    assert ada.endswith(",31")


def test_the_controller_of_a_class_must_be_one_of_its_machines(
    labctl: Labctl, course: Path
) -> None:
    file = course / "course.yaml"
    text = (
        "course: ml\nserver: {provider: static, static: {hosts: [gpu1.lab.example, staff@gpu2]}}\n"
        "shared: {engine: slurm, controller: gpu2, homes: /srv/class}\n"
    )
    file.write_text(text)
    plan = in_course(labctl, "plan", "--offline")
    assert plan.code == 0
    assert "one cluster: controller gpu2, and gpu1.lab.example; 2 accounts" in plan.out
    file.write_text(text.replace("controller: gpu2", "controller: gpu3"))
    for command in (("plan", "--offline"), ("plan",), ("up", "--yes")):
        refused = in_course(labctl, *command)
        assert refused.code == 2, refused.err
        assert "shared.controller in course.yaml is gpu3" in refused.err
        assert "gpu1.lab.example, gpu2" in refused.err
    file.write_text(
        "course: ml\nserver: {provider: aws}\nshared: {engine: slurm, controller: gpu1}\n"
    )
    refused = in_course(labctl, "plan", "--offline")
    assert refused.code == 2
    assert "needs machines with names" in refused.err


def test_costs_are_told_and_exported_without_names(labctl: Labctl, course: Path) -> None:
    from labctl.courses.records.ledger import Ledger

    ledger = Ledger(course / ".course" / "ledger.jsonl")
    about = {"server_id": "i-1"}
    ledger.append("up", seat="ada", usd_per_hour=2.0, created_at=0.0, **about)
    spent = {"from": 0.0, "until": 7200.0, "usd": 4.0, "idle_s": 5400.0}
    ledger.append("cost", seat="ada", **about, **spent)
    ledger.append("down", seat="ada", **about)
    said = in_course(labctl, "cost")
    assert said.code == 0
    rows = [line.split() for line in said.out.splitlines() if line.startswith("ada")]
    assert [row[:4] for row in rows] == [
        ["ada", "Ada", "Lovelace", "$4.00"],
        ["ada", "Ada", "Lovelace", "$3.00"],
    ]
    assert "the most expensive idle hours" in said.out
    budgets = in_course(labctl, "budget").out.splitlines()
    assert next(line for line in budgets if line.startswith("ada ")).split()[1:3] == [
        *("Ada", "Lovelace")
    ]
    found = read(in_course(labctl, "cost", "--json"))["costs"]
    assert (found["usd"], found["idle_usd"]) == (4.0, 3.0)
    assert found["assignments"][0]["assignment"] == "hw3"
    exported = in_course(labctl, "cost", "--csv").out.splitlines()
    assert exported[0].startswith("student,team,section,active,usd,hours,idle_hours")
    assert exported[1] == "ada,,Lab A,yes,4.0000,2.000,1.500,4.0000,20.00,16.0000"
    assert "Lovelace" not in "".join(exported)


def test_grades_are_written_in_the_rosters_own_form(labctl: Labctl, course: Path) -> None:
    place = course / ".course" / "grades" / "hw3" / "ada"
    place.mkdir(parents=True)
    own = {"submission": 1, "late_s": 60, "penalty": 10}
    body = {"score": 95, "extra_data": {"labctl": own}}
    (place / "results.json").write_text(json.dumps(body))
    shown = in_course(labctl, "grades", "hw3")
    assert shown.code == 0
    assert "85" in shown.out
    assert "nothing was submitted" in shown.out
    said = in_course(labctl, "grades", "hw3", "--format", "canvas", "-o", "out.csv")
    assert said.code == 0
    lines = (course.parent / "out.csv").read_bytes().decode("utf-8-sig").splitlines()
    assert lines[0] == "Student,ID,SIS User ID,SIS Login ID,Section,hw3 (103)"
    assert lines[2] == '"Lovelace, Ada",11,s001,ada@uni.edu,Lab A,85'
    plain = in_course(labctl, "grades", "hw3", "--format", "csv", "--no-penalty")
    assert "hw3,ada,,95,10,95,100" in plain.out
    assert in_course(labctl, "grades", "hw3", "--format", "moodle").code == 2
    assert in_course(labctl, "grades", "hw4").code == 4
    # Nothing was graded by `course grade`: there is no feedback that could be released.
    assert in_course(labctl, "grades", "hw3", "--release").code == 4


def test_a_folder_that_is_no_course_says_how_one_begins(labctl: Labctl, home: Path) -> None:
    said = labctl("course", "plan", "--offline")
    assert said.code == 2
    assert "labctl course init" in said.err


def test_the_help_shows_what_there_is_and_near_words(labctl: Labctl, home: Path) -> None:
    said = labctl("course", "--help")
    assert said.code == 0
    for name in ("init", "plan", "budget", "grades"):
        assert f"  {name} " in said.out
        assert "labctl course" in labctl("course", name, "--help").out
    assert "door" not in said.out
    assert "did you mean plan?" in labctl("course", "plam").err
