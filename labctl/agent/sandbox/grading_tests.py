"""Run staff's tests with pytest, and write what each earned as results.json in Gradescope's format.

`@pytest.mark.points(5, visibility="hidden")` on a test function says what it is worth, and who may
see it; the cases of a parametrized test share its points. The fixture `outputs` has what the
functions of staff's probe.py returned in the student's container. Exits with 1 if pytest could not
run all tests.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

try:
    import pytest
except ImportError:
    sys.exit("the grading image has no pytest: add it to the image (grading.image in course.yaml)")

# The files are those that `labctl course plan` reads.
OPTIONS = (
    "-q", "--tb=short", "--color=no", "-c", "/dev/null", "-p", "no:cacheprovider",
    "-o", "python_files=test_*.py",
)  # fmt: skip
MARKER = "points(value, visibility): what a test is worth, and who may see its result"
MOST_OUTPUT = 1000
# pytest's exit codes for tests that ran: all passed, some failed.
HAS_RUN = (0, 1)


class Worth(NamedTuple):
    """What one test, or one case of it, is worth."""

    points: float
    visibility: str


class ScoredTest(NamedTuple):
    """A test of results.json."""

    name: str
    score: float
    max_score: float
    status: str
    output: str
    visibility: str


class Outputs:
    """What staff's probe got from the student's code, by the probe's function."""

    def __init__(self, records: dict[str, object], problem: str = "") -> None:
        self._records = records
        self._problem = problem

    def __getitem__(self, name: str) -> Any:
        """Return a value; the test fails if the student's code did not give one."""
        record = self._records.get(name)
        if isinstance(record, dict) and "value" in record and not record.get("error"):
            return record["value"]
        error = record.get("error") if isinstance(record, dict) else ""
        why = self._problem or error or "there is no such output"
        pytest.fail(f"{name}: {why}", pytrace=False)


def read_outputs(path: Path) -> Outputs:
    """Read the outputs; a student's program may have written anything there."""
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return Outputs({}, "the outputs of the student's program cannot be read")
    is_object = isinstance(records, dict)
    return Outputs(records) if is_object else Outputs({}, "the outputs are not an object")


@pytest.fixture(scope="session")
def outputs() -> Outputs:
    return read_outputs(Path(os.environ["LABCTL_PREDICTIONS"]))


class ScoreRecorder:
    """A pytest plugin that records the result of each test."""

    def __init__(self, visibility: str) -> None:
        self.visibility = visibility
        self.worth: dict[str, Worth] = {}
        self.problems: dict[str, str] = {}

    def pytest_configure(self, config: pytest.Config) -> None:
        config.addinivalue_line("markers", MARKER)

    def pytest_collection(self) -> None:
        # Public tests import the student's code, which is the working directory there. By now,
        # pytest has loaded its plugins: it does not load any from that directory.
        sys.path.insert(0, str(Path.cwd()))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        functions = {item.nodeid: item.nodeid.split("[")[0] for item in items}
        cases = Counter(functions.values())
        for item in items:
            marks = [mark for mark in item.own_markers if mark.name == "points"]
            points, visibility = read_mark(marks[0]) if marks else (0.0, "")
            share = points / cases[functions[item.nodeid]]
            self.worth[item.nodeid] = Worth(share, visibility or self.visibility)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.problems.setdefault(report.nodeid, report.longreprtext)
        elif report.skipped:
            self.problems.setdefault(report.nodeid, "skipped")

    def score_tests(self) -> list[ScoredTest]:
        return [self.score_test(name, worth) for name, worth in self.worth.items()]

    def score_test(self, name: str, worth: Worth) -> ScoredTest:
        has_passed = name not in self.problems
        output = self.problems.get(name, "")[-MOST_OUTPUT:]
        return ScoredTest(
            name=name,
            score=round(worth.points, 6) if has_passed else 0.0,
            max_score=round(worth.points, 6),
            status="passed" if has_passed else "failed",
            # It may quote the student's text, with half of a surrogate pair.
            output=output.encode("utf-8", "replace").decode("utf-8"),
            visibility=worth.visibility,
        )


def read_mark(mark: pytest.Mark) -> tuple[float, str]:
    return float(mark.args[0]), str(mark.kwargs.get("visibility", ""))


def main() -> int:
    sys.dont_write_bytecode = True
    folder = os.environ["LABCTL_TESTS"]
    recorder = ScoreRecorder(os.environ["LABCTL_VISIBILITY"])
    plugins = [recorder, sys.modules[__name__]]
    code = int(pytest.main([*OPTIONS, "--rootdir", folder, folder], plugins=plugins))
    if code not in HAS_RUN:
        print(f"pytest ended with {code} before all tests had run")
        return 1
    tests = recorder.score_tests()
    score = round(sum(test.score for test in tests), 4)
    results = {"score": score, "tests": [test._asdict() for test in tests]}
    Path(os.environ["LABCTL_RESULTS"]).write_text(
        json.dumps(results, ensure_ascii=False), encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
