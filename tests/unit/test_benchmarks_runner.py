"""The runner of the benchmarks: what it keeps after an interrupt, an error, and too little time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from benchmarks.circumstances import Circumstances
from benchmarks.groups import GROUPS
from benchmarks.measure import Comparison, NotDoneError, Row
from benchmarks.results import Results, UnreadableResultsError
from benchmarks.runner import Group, print_verdict, run_groups
from benchmarks.settings import QUICK, Settings

CIRCUMSTANCES = Circumstances(
    cpus=2,
    cpu="",
    memory_gib=4.0,
    load=[0.0],
    system="",
    python="",
    labctl="",
    is_this_tree=True,
    click="",
    ssh="",
    rsync="",
    docker="",
    peers={},
)
QUICK_MINUTES = 5


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path / "home", QUICK, {}, "image", slow_peers=False)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results.create(tmp_path / "results", QUICK, CIRCUMSTANCES, quick=False)


def count_up(figures: list[float]) -> Callable[[int], float]:
    """Return work whose figures are 1, 2, …, and which records them."""

    def work(number: int) -> float:
        figures.append(float(len(figures) + 1))
        return figures[-1]

    return work


def make_group(*comparisons: Comparison, quick_s: float = 60.0) -> Group:
    def compare(settings: Settings) -> Generator[Comparison]:
        yield from comparisons

    return Group(compare, quick_s)


def compare_two(title: str, work: Callable[[int], float], rounds: int = 2) -> Comparison:
    rows = [Row("other", lambda number: 10.0), Row("labctl", work, target=0.5)]
    return Comparison(title, rows, rounds)


def test_row_has_both_sides_and_a_verdict(settings: Settings, results: Results) -> None:
    group = make_group(compare_two("copy", count_up([])))
    assert run_groups({"data": group}, settings, results)
    other, own = Results.load(results.path).record.rows
    assert (other.ours, other.theirs, other.ratio, other.met) == (None, 10.0, None, None)
    # the first round, whose figure is 1, is discarded
    assert own.figures == [2.0, 3.0]
    assert (own.ours, own.theirs, own.ratio, own.target, own.met) == (2.5, 10.0, 0.25, 0.5, True)


def test_file_is_complete_at_every_turn(settings: Settings, results: Results) -> None:
    counts = []

    def work(number: int) -> float:
        earlier = Results.load(results.path)
        counts.append(len(earlier.record.rows))
        assert not any(row.complete for row in earlier.record.rows)
        assert [path.name for path in results.path.parent.iterdir()] == [results.path.name]
        return 1.0

    assert run_groups({"data": make_group(compare_two("copy", work))}, settings, results)
    assert counts == [1, 2, 2]
    assert all(row.complete for row in Results.load(results.path).record.rows)


def test_failed_replacement_leaves_the_earlier_file(
    settings: Settings, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_groups({"data": make_group(compare_two("copy", count_up([])))}, settings, results)
    before = results.path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        results.end_group("data", cut_short=False)
    assert results.path.read_bytes() == before


def test_resume_measures_only_what_is_missing(settings: Settings, results: Results) -> None:
    first: list[float] = []
    second: list[float] = []

    def interrupt(number: int) -> float:
        raise KeyboardInterrupt

    group = make_group(compare_two("first", count_up(first)), compare_two("second", interrupt))
    with pytest.raises(KeyboardInterrupt):
        run_groups({"data": group}, settings, results)
    resumed = Results.load(results.path)
    group = make_group(
        compare_two("first", count_up(first)), compare_two("second", count_up(second))
    )
    assert run_groups({"data": group}, settings, resumed)
    assert (len(first), len(second)) == (3, 3)
    rows = [(row.comparison, row.name) for row in Results.load(results.path).record.rows]
    assert rows == [(title, name) for title in ("first", "second") for name in ("other", "labctl")]
    assert run_groups({"data": group}, settings, Results.load(results.path))
    assert (len(first), len(second)) == (3, 3)


def test_failed_group_is_reported_and_the_others_run(
    settings: Settings, results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = []

    def fail(number: int) -> float:
        raise NotDoneError("the server printed nothing")

    def compare(settings: Settings) -> Iterator[Comparison]:
        try:
            yield compare_two("copy", fail)
        finally:
            ended.append("data")

    groups = {"data": Group(compare, 60.0), "soak": make_group(compare_two("x", count_up([])))}
    assert not run_groups(groups, settings, results)
    assert ended == ["data"]
    record = Results.load(results.path).record
    assert record.errors == {"data": "NotDoneError: copy: labctl: the server printed nothing"}
    assert record.done == ["soak"]
    print_verdict(results)
    assert "data: failed: NotDoneError: copy: labctl: the server" in capsys.readouterr().out
    repaired = {"data": make_group(compare_two("copy", count_up([])))}
    assert run_groups(repaired, settings, Results.load(results.path))
    assert Results.load(results.path).record.errors == {}


def test_failed_row_costs_no_other(settings: Settings, results: Results) -> None:
    def fail(number: int) -> float:
        if number:
            raise NotDoneError("no output")
        return 1.0

    first, second = (compare_two(title, count_up([])) for title in ("first", "second"))
    first.rows.insert(1, Row("broken", fail, target=0.5))
    assert not run_groups({"data": make_group(first, second)}, settings, results)
    record = Results.load(results.path).record
    assert record.errors == {"data": "NotDoneError: first: broken: no output"}
    assert [(row.comparison, row.name, row.complete) for row in record.rows] == [
        (title, name, True) for title in ("first", "second") for name in ("other", "labctl")
    ]
    # a resumption measures the comparison again whose row failed
    assert not Results.load(results.path).has_measured("data", first)
    assert Results.load(results.path).has_measured("data", second)


def test_failed_baseline_ends_its_group(settings: Settings, results: Results) -> None:
    def fail(number: int) -> float:
        raise NotDoneError("no output")

    first, second = (compare_two(title, count_up([])) for title in ("first", "second"))
    first.rows[0].work = fail
    assert not run_groups({"data": make_group(first, second)}, settings, results)
    record = Results.load(results.path).record
    assert (record.errors, record.rows) == ({"data": "NotDoneError: no output"}, [])


def test_quick_ends_a_group_after_its_time(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Results.create(tmp_path / "results", QUICK, CIRCUMSTANCES, quick=True)
    figures: list[float] = []
    first = compare_two("first", count_up(figures))
    first.rows.append(Row("alternative", count_up(figures)))
    group = make_group(first, compare_two("second", count_up(figures)), quick_s=0.0)
    assert run_groups({"data": group}, settings, results)
    # the first round and one more, of the baseline and of labctl's row only
    assert figures == [1.0, 2.0]
    record = Results.load(results.path).record
    assert [row.name for row in record.rows] == ["other", "labctl"]
    assert (record.done, record.cut_short) == ([], ["data"])
    print_verdict(results)
    output = capsys.readouterr().out
    assert "(1 round, QUICK FIGURES)" in output
    assert "its time with --quick ended" in output
    assert results.path.name.endswith("-quick.json")
    # each resumption measures one more comparison, however little time there is
    assert run_groups({"data": group}, settings, Results.load(results.path))
    assert Results.load(results.path).record.done == ["data"]


def test_missed_target_is_in_the_final_table(
    settings: Settings, results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = compare_two("copy", lambda number: 6.0)
    assert run_groups({"data": make_group(slow)}, settings, results)
    capsys.readouterr()
    print_verdict(results)
    output = capsys.readouterr().out
    assert "0 of 1 targets met; missed:" in output
    assert "copy: labctl" in output


def test_other_formats_cannot_be_resumed(tmp_path: Path, results: Results) -> None:
    with pytest.raises(UnreadableResultsError, match="cannot be read"):
        Results.load(tmp_path / "absent.json")
    results.record.version = 2
    results.end_group("data", cut_short=False)
    with pytest.raises(UnreadableResultsError, match="has format 2"):
        Results.load(results.path)


def test_all_groups_fit_five_minutes() -> None:
    assert sum(group.quick_s for group in GROUPS.values()) <= QUICK_MINUTES * 60
