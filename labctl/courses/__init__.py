"""Courses: a roster, servers for a class, requests of students, collection and grading, costs.

`records/` is the course's folder, `grading/` are grades as values, every other file is one flow of
the instructor's side. `context` is what they get, `scheduler` is the process of `labctl course
serve`, and `tasks` what it does by itself; `requests` answers students. `join`, `course_update` and
`starter_delivery` run on a student's machine.

May import: keeper, lifecycle, submissions and the layers below.
"""
