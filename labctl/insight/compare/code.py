"""Whether several runs had the same code, by what was pushed before each, or by their commits."""

from __future__ import annotations

from collections.abc import Sequence

from labctl.insight.report.facts import ReportFacts
from labctl.runs.provenance import RunOrigin

MOST_NAMED = 8


def describe_code(runs: Sequence[ReportFacts], labels: Sequence[str]) -> str:
    """Say in a sentence whether the code of the runs differs, with the names of the files."""
    origins = [facts.code for facts in runs if facts.code and facts.code.code_sha256]
    if len(origins) == len(runs):
        return _compare_pushed(origins)
    commits = {
        facts.code.commit if facts.code and facts.code.dirty is False else "" for facts in runs
    }
    if len(commits) == 1 and (commit := commits.pop()):
        return f"The code is the same: git commit {commit[:12]}."
    if commits and "" not in commits:
        return "The code differs: the runs have different git commits."
    lacking = [
        label
        for label, facts in zip(labels, runs, strict=True)
        if not (facts.code and facts.code.code_sha256)
    ]
    names = " and ".join(filter(None, [", ".join(lacking[:-1]), lacking[-1]]))
    return f"Changes of the code are not compared: the code of {names} was not recorded."


def _compare_pushed(origins: Sequence[RunOrigin]) -> str:
    if len({one.code_sha256 for one in origins}) == 1:
        return "The pushed code is the same."
    if not all(one.files for one in origins):
        return "The pushed code differs."
    paths = sorted({path for one in origins for path in one.files})
    changed = [path for path in paths if len({one.files.get(path) for one in origins}) > 1]
    more = f" and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
    return f"The pushed code differs: {', '.join(changed[:MOST_NAMED])}{more}."
