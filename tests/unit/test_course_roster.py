"""Rosters as course systems write them: every bad line is named, nobody is lost or mixed up."""

from __future__ import annotations

import codecs
import csv
import io
from pathlib import Path

import pytest
from course_rosters import (
    CANVAS,
    CLASSROOM,
    MOODLE,
    NBGRADER,
    NBGRADER_GRADES,
    PLAIN,
    WORKSHEET,
    table_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from labctl.courses.records.roster import parse_roster, read_roster, roster_bytes, write_roster
from labctl.courses.records.roster_checks import derive_id, id_problem
from labctl.courses.records.roster_formats import detect_format, read_people
from labctl.courses.records.roster_import import (
    ImportKeys,
    compare,
    load_keys,
    read_table_file,
    save_keys,
)
from labctl.courses.records.student import Student
from labctl.courses.records.tables import MAX_TABLE_BYTES, TableShape, read_table
from labctl.errors import ConfigError, LabError, NotFoundError, Problem, UsageError
from labctl.model import NAME_PATTERN


def written(delimiter: str) -> bytes:
    """The Canvas export as a spreadsheet with another separator saves it."""
    rows = csv.reader(io.StringIO(CANVAS))
    return TableShape(delimiter=delimiter, newline="\r\n").write(rows)


def told(text: str | bytes, format: str = "") -> list[tuple[int, str]]:
    """(line, what is wrong with it) of a roster that is refused."""
    problems: list[Problem] = []
    table = read_table(text.encode() if isinstance(text, str) else text, problems)
    if table is not None and not problems:
        with pytest.raises(ConfigError) as raised:
            compare(table, "roster.csv", format=format)
        problems = list(raised.value.problems)
    return [(one.line, one.message) for one in problems]


@pytest.mark.parametrize(
    ("text", "name", "ids"),
    [
        (CANVAS, "canvas", ["ada", "jmueller"]),
        (MOODLE, "moodle", ["ada", "joerg-mueller"]),
        (WORKSHEET, "moodle", ["ada"]),
        (CLASSROOM, "classroom", ["ada-l", "joerg"]),
        (NBGRADER, "nbgrader", ["bitdiddle", "hacker"]),
        (NBGRADER_GRADES, "nbgrader", ["bitdiddle"]),
        (PLAIN, "csv", ["ada", "bob"]),
        ("name,email\nAda Lovelace,\nBob,bob@x.edu\n", "csv", ["ada-lovelace", "bob"]),
    ],
)
def test_the_format_is_told_by_the_header(text: str, name: str, ids: list[str]) -> None:
    diff = compare(table_of(text), "roster.csv")
    assert (diff.format, [one.id for one in diff.added]) == (name, ids)


@pytest.mark.parametrize(
    "data",
    [
        CANVAS.encode("utf-8-sig"),
        CANVAS.replace("\n", "\r\n").encode(),
        codecs.BOM_UTF16_LE + CANVAS.encode("utf-16-le"),
        codecs.BOM_UTF16_BE + CANVAS.encode("utf-16-be"),
        CANVAS.encode("utf-16-le"),
        b"sep=;\r\n" + written(";"),
        written(";"),
        written("\t"),
    ],
    ids=["bom", "crlf", "utf-16-le", "utf-16-be", "no mark", "sep=;", "semicolons", "tabs"],
)
def test_however_the_file_was_saved_the_same_people_stand_in_it(data: bytes) -> None:
    table = table_of(data)
    people = read_people(table, detect_format(table), [])
    assert [(one.key, one.login, one.section) for one in people] == [
        ("11", "ada@uni.edu", "Lab A"),
        ("12", "jmueller", "Lab B"),
    ]
    assert people[1].name == "Jörg Müller"


def test_last_comma_first_is_turned_and_points_and_test_students_are_no_people() -> None:
    people = read_people(table_of(CANVAS), "canvas", [])
    assert [one.name for one in people] == ["Ada Lovelace", "Jörg Müller"]


def test_every_bad_row_is_named_by_its_line_and_all_at_once(tmp_path: Path) -> None:
    bad = (
        "id,name,email\n"
        "-oProxyCommand=x,Eve,eve@x.edu\n"
        "Alice,Alice,alice@x.edu\n"
        "bob,Bob,not an address\n"
        "bob,Bob the second,\n"
        "carl,Carl\n"
        'dora,"Do\nra",\n'
        "../../etc,Eva,\n"
        "fay,Fay,alice@x.edu\n"
    )
    file = tmp_path / "bad.csv"
    file.write_text(bad)
    with pytest.raises(ConfigError) as raised:
        read_table_file(file)
    lines = {one.line: one.message for one in raised.value.problems}
    # Line 8 is inside the quotes of the row that begins on line 7.
    assert list(lines) == [2, 3, 4, 6, 7, 9]
    assert "'-oProxyCommand=x' is not an id" in lines[2]
    assert "try" not in lines[2]
    assert "try alice" in lines[3]
    assert "not an email address" in lines[4]
    assert lines[6] == "2 cells, but the header has 3"


def test_rows_that_are_wrong_inside_are_told_beside_rows_of_the_wrong_length(
    tmp_path: Path,
) -> None:
    file = tmp_path / "r.csv"
    file.write_text("id,name\nA,Alice\nbob\nC,Carl\n")
    with pytest.raises(ConfigError) as raised:
        read_table_file(file)
    assert [one.line for one in raised.value.problems] == [2, 3, 4]


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('id,name\nbob,"Bob\nalice,Alice\n', 2, "a quotation mark is not closed"),
        (b"id,name\nbob,J\xf6rg\n", 2, "0xf6 is not UTF-8"),
        (b"id,name\nbob,B\x00b\n", 2, "a zero byte"),
        ("", 0, "the file is empty"),
        ("id,id\nbob,bob\n", 1, "occurs twice"),
        ("id,name\nbob,B\x1b[2Jb\n", 2, "unprintable character"),
        ("id,name\nada,A\nada,B\n", 3, "is already on line 2"),
        ("id,email\nada,a@x.edu\nbob,A@x.edu\n", 3, "is already on line 2"),
        ("id,team\nada,\nbob,Ada\n", 3, "has the id of a student outside it"),
        ("id,name\n", 0, "it lists no students"),
        ("name\n-oProxyCommand=x\n", 0, ""),
        ("name\n???\n", 2, "cannot derive an id from"),
        (NBGRADER.replace("hacker,", "-oProxyCommand=x,"), 3, "is not a login"),
        (CANVAS.replace(",12,", ",11,"), 5, "is already on line 4"),
    ],
)
def test_what_is_wrong_says_where(text: str | bytes, line: int, said: str) -> None:
    if not said:
        # A name, however it looks, is only ever a name: the id that it gives is harmless.
        assert compare(table_of(text), "r").added[0].id == "oproxycommand-x"
        return
    found = told(text)
    assert [number for number, _ in found] == [line]
    assert said in found[0][1]


@pytest.mark.parametrize("text", ["", "id,name\n"])
def test_an_empty_roster_shows_the_form_of_its_lines(text: str, tmp_path: Path) -> None:
    file = tmp_path / "roster.csv"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        compare(read_table_file(file)[1], str(file))
    assert raised.value.hint.splitlines()[1:] == [
        "id,name,email",
        "alice,Alice Jones,alice@example.edu",
    ]


def test_a_table_that_is_no_roster_says_what_would_be() -> None:
    with pytest.raises(ConfigError, match="not a roster that labctl recognizes") as raised:
        compare(table_of("colour,shape\nred,round\n"), "shapes.csv")
    assert "Canvas" in raised.value.why


def test_a_format_that_is_asked_for_must_be_the_one() -> None:
    with pytest.raises(UsageError, match="not a table from canvas"):
        compare(table_of(PLAIN), "plain.csv", format="canvas")


def test_two_people_with_one_name_have_two_ids_and_keep_them() -> None:
    text = 'Student,ID,SIS Login ID,Section\n"Müller, Jan",1,,A\n"Müller, Jan",2,,A\n'
    first = compare(table_of(text), "c.csv")
    assert [one.id for one in first.students] == ["jan-mueller", "jan-mueller-2"]
    turned = "\n".join([text.splitlines()[0], *reversed(text.splitlines()[1:])]) + "\n"
    again = compare(table_of(turned), "c.csv", first.students, first.keys)
    assert again.is_empty
    assert again.keys == first.keys


def test_a_new_person_never_gets_an_id_that_was_somebodys() -> None:
    first = compare(table_of("Student,ID,SIS Login ID,Section\nA,1,kim,\n"), "c.csv")
    then = compare(
        table_of("Student,ID,SIS Login ID,Section\nB,2,kim,\n"), "c.csv", first.students, first.keys
    )
    assert [one.id for one in then.added] == ["kim-2"]
    assert [one.id for one in then.left] == ["kim"]


def test_who_is_not_in_the_newer_roster_stays_as_inactive_and_can_come_back() -> None:
    first = compare(table_of(PLAIN), "r.csv")
    without = "id,name\nada,Ada\n"
    then = compare(table_of(without), "r.csv", first.students, first.keys)
    assert [one.id for one in then.left] == ["bob"]
    assert {one.id: one.active for one in then.students} == {"ada": True, "bob": False}
    assert compare(table_of(without), "r.csv", first.students, first.keys, keep=True).is_empty
    back = compare(table_of(PLAIN), "r.csv", then.students, then.keys)
    assert [one.id for one in back.returned] == ["bob"]


def test_what_a_roster_does_not_say_stays_as_it_was() -> None:
    first = compare(table_of(PLAIN), "r.csv")
    then = compare(
        table_of("id,name\nada,Ada King\nbob,Bob\n"), "r.csv", first.students, first.keys
    )
    assert [one.fields for one in then.changed] == [("name",)]
    assert then.students[0] == Student(
        id="ada", name="Ada King", email="ada@uni.edu", team="team-7", section="A"
    )


def test_another_system_finds_the_same_people_by_their_addresses() -> None:
    first = compare(table_of(PLAIN), "r.csv")
    then = compare(
        table_of("First name,Last name,Email address\nAda,L,ADA@uni.edu\nBob,B,bob@uni.edu\n"),
        "m.csv",
        first.students,
        first.keys,
    )
    assert then.added == ()
    assert then.keys.keys["moodle"] == {"ADA@uni.edu": "ada", "bob@uni.edu": "bob"}


def test_groups_of_moodles_participants_are_sections() -> None:
    header = "First name,Last name,Email address,Groups\n"
    rows = (
        'Ada,L,ada@uni.edu,"Lab 1, Tuesday"\nBob,B,bob@uni.edu,Lab 2\nCyd,C,cyd@uni.edu,No groups\n'
    )
    students = compare(table_of(header + rows), "participants.csv").students
    assert [one.sections for one in students] == [("Lab 1", "Tuesday"), ("Lab 2",), ()]
    assert {one.team for one in students} == {""}, "a section is no team"


def test_a_worksheet_of_moodle_is_about_the_people_of_its_participants() -> None:
    first = compare(table_of(MOODLE), "participants.csv")
    for sheet in (WORKSHEET, WORKSHEET.replace("3001", "3555")):
        then = compare(table_of(sheet), "hw3.csv", first.students, first.keys, keep=True)
        assert (then.added, then.changed, then.left) == ((), (), ())
        assert then.keys == first.keys
    # An earlier version stored the number of a worksheet, which another one does not have.
    keys = ImportKeys(keys={"moodle": {"Participant 3000": first.students[0].id}})
    then = compare(table_of(WORKSHEET), "hw3.csv", first.students, keys, keep=True)
    assert (then.added, then.changed) == ((), ())
    assert then.keys.keys["moodle"]["ada@uni.edu"] == first.students[0].id
    nameless = WORKSHEET.replace("ada@uni.edu", "")
    anew = compare(table_of(nameless), "hw3.csv")
    assert list(anew.keys.keys["moodle"]) == ["Participant 3001"]


def test_the_keys_are_kept_and_a_damaged_file_of_them_is_told(tmp_path: Path) -> None:
    assert load_keys(tmp_path) == ImportKeys()
    save_keys(tmp_path, ImportKeys(keys={"canvas": {"1": "ada"}}))
    assert load_keys(tmp_path).keys == {"canvas": {"1": "ada"}}
    assert (tmp_path / "keys.json").stat().st_mode & 0o777 == 0o600
    (tmp_path / "keys.json").write_text("{")
    with pytest.raises(LabError, match="damaged"):
        load_keys(tmp_path)


def test_labctls_own_roster_is_read_as_it_is_written(tmp_path: Path) -> None:
    students = [
        Student(id="ada", name='Ada "the" Lovelace, Countess', email="a@x.edu", team="t1"),
        Student(id="bob", name="Bøb;", section="=1+1", active=False),
    ]
    file = tmp_path / "roster.csv"
    write_roster(file, students)
    assert read_roster(file) == students
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_roster_that_was_edited_by_hand_is_checked_too(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_roster(tmp_path / "roster.csv")
    text = b"id,name,active,colour\nada,A,maybe,red\n-x,B,yes,\n"
    with pytest.raises(ConfigError) as raised:
        parse_roster(text, "roster.csv")
    assert [(one.line, one.message.split(":")[0]) for one in raised.value.problems] == [
        (1, "unknown column 'colour'"),
        (2, "active must be yes or no, not 'maybe'"),
        (3, "'-x' is not an id"),
    ]
    with pytest.raises(ConfigError, match="problem"):
        parse_roster(b"name\nAda\n", "roster.csv")


@given(st.text(max_size=80))
def test_whatever_an_id_is_made_of_it_is_one(text: str) -> None:
    made = derive_id(text)
    assert made == "" or NAME_PATTERN.fullmatch(made)
    assert (id_problem(text) == "") == bool(NAME_PATTERN.fullmatch(text))


@settings(max_examples=60)
@given(st.binary(max_size=400))
def test_no_bytes_make_the_reader_fail_otherwise_than_by_saying_so(data: bytes) -> None:
    problems: list[Problem] = []
    table = read_table(data, problems)
    assert table is not None or problems


@settings(max_examples=60)
@given(
    st.lists(
        st.builds(
            Student,
            id=st.from_regex(NAME_PATTERN.pattern.removesuffix("$") + r"\Z"),
            name=st.text(st.characters(exclude_categories=("C", "Z")), max_size=30),
            active=st.booleans(),
        ),
        unique_by=lambda one: one.id,
        max_size=6,
    )
)
def test_every_roster_comes_back_from_its_file(students: list[Student]) -> None:
    assert parse_roster(roster_bytes(students), "r") == students


def test_spaces_and_joiners_of_other_scripts_are_no_fault() -> None:
    text = "id,name\nali,\u0639\u0644\u06cc\u200c\u0631\u0636\u0627\nann,Ann\u00a0Lee\n"
    assert [one.name for one in compare(table_of(text), "r").students] == [
        "\u0639\u0644\u06cc\u200c\u0631\u0636\u0627",
        "Ann Lee",
    ]
    assert "unprintable character" in told("id,name\nann,Ann\u202eeel\n")[0][1]


def test_where_the_keys_were_lost_the_same_people_are_found_by_name(tmp_path: Path) -> None:
    first = compare(table_of(CANVAS), "c.csv")
    again = compare(table_of(CANVAS), "c.csv", first.students, ImportKeys())
    assert again.is_empty
    assert again.keys == first.keys


@pytest.mark.parametrize("path", ["/dev/zero", "/dev", "/nowhere/roster.csv"])
def test_only_files_are_read_and_never_without_end(path: str) -> None:
    with pytest.raises(LabError, match="cannot read"):
        read_table_file(Path(path))


def test_a_file_that_is_too_large_is_told(tmp_path: Path) -> None:
    (tmp_path / "big.csv").write_bytes(b"id,name\n" + b"x" * MAX_TABLE_BYTES)
    with pytest.raises(ConfigError) as raised:
        read_table_file(tmp_path / "big.csv")
    assert "8 MiB" in raised.value.problems[0].message


def test_two_quizzes_of_one_name_are_nobodys_matter() -> None:
    head = "First name,Last name,Email address,Quiz (Real),Quiz (Real)"
    problems: list[Problem] = []
    table = read_table(f"{head}\nAda,Byron,ada@x.edu,1,2\n".encode(), problems)
    assert table is not None
    assert not problems
    assert [one.id for one in compare(table, "moodle.csv").students] == ["ada"]
