"""Rosters as course systems write them."""

from __future__ import annotations

from labctl.courses.records.tables import Table, read_table
from labctl.errors import Problem

CANVAS = """Student,ID,SIS User ID,SIS Login ID,Section,hw1 (101),hw3 (103),Current Score
,,,,,Manual Posting,,(read only)
    Points Possible,,,,,10,100,(read only)
"Lovelace, Ada",11,s001,ada@uni.edu,Lab A,9,,
"Müller, Jörg",12,s002,jmueller,Lab B,8,,
"Student, Test",99,,0a1b2c3d,Lab A,,,
"""
MOODLE = """First name,Last name,ID number,Email address,Assignment: hw3 (Real),Course total (Real)
Ada,Lovelace,4711,ada@uni.edu,-,-
Jörg,Müller,4712,joerg.mueller@uni.edu,-,-
"""
WORKSHEET = """Identifier,Full name,Email address,Status,Grade,Maximum Grade,Feedback comments
Participant 3001,Ada Lovelace,ada@uni.edu,Submitted for grading,,100.00,
"""
CLASSROOM = """"identifier","github_username","github_id","name"
"ada@uni.edu","ada-l","123","Ada Lovelace"
"joerg","","",""
"""
NBGRADER = """id,first_name,last_name,email,lms_user_id
Bitdiddle,Ben,Bitdiddle,ben@uni.edu,7
hacker,Alyssa,Hacker,,8
"""
NBGRADER_GRADES = (
    "assignment,duedate,timestamp,student_id,last_name,first_name,email,raw_score,"
    "late_submission_penalty,score,max_score\n"
    "hw1,,,bitdiddle,Bitdiddle,Ben,ben@uni.edu,3,0,3,10\n"
    "hw2,,,bitdiddle,Bitdiddle,Ben,ben@uni.edu,4,0,4,10\n"
)
PLAIN = "id,name,email,team,section\nada,Ada,ada@uni.edu,Team 7,A\nbob,Bob,bob@uni.edu,Team 7,A\n"


def table_of(text: str | bytes) -> Table:
    problems: list[Problem] = []
    table = read_table(text.encode() if isinstance(text, str) else text, problems)
    assert table is not None, problems
    assert not problems
    return table
