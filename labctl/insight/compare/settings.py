"""What was set differently for several runs: command, code, image, variables and server."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from labctl.insight.report.curves import is_result, metric_name
from labctl.insight.report.facts import ReportFacts
from labctl.insight.report.formatting import number
from labctl.model import Value
from labctl.runs.provenance import SECRET_NAME, ServerHardware

NOT_RECORDED = "not recorded"
NOT_SET = "-"
HIDDEN = "hidden"
MOST_SETTINGS = 60
LONGEST_VALUE = 120
_NUMBER = re.compile(r"-[0-9.]")


class SettingDifference(Value, frozen=True):
    """A setting, and its value for each run as text; "-" where it was not set."""

    name: str
    values: tuple[str, ...]


def find_differences(runs: Sequence[ReportFacts]) -> tuple[SettingDifference, ...]:
    """Find every recorded setting that is not the same for all runs, in a stable order."""
    settings = [_collect_settings(facts) for facts in runs]
    names = dict.fromkeys(name for one in settings for name in one)
    differences = []
    for name in names:
        values = tuple(one.get(name, NOT_SET) for one in settings)
        if len(set(values)) > 1:
            differences.append(SettingDifference(name=name, values=_hide(name, values)))
    return tuple(differences[:MOST_SETTINGS])


def _hide(name: str, values: tuple[str, ...]) -> tuple[str, ...]:
    """Shorten the values of a setting, and hide them if its name suggests a secret."""
    if SECRET_NAME.search(name):
        return tuple(value if value == NOT_SET else HIDDEN for value in values)
    return tuple(v if len(v) <= LONGEST_VALUE else f"{v[: LONGEST_VALUE - 1]}…" for v in values)


def _collect_settings(facts: ReportFacts) -> dict[str, str]:
    """Return the settings of a run by name. A value that nothing recorded is NOT_RECORDED."""
    code, run = facts.code, facts.run
    settings = parse_command(code.command if code and code.command else run.command)
    settings |= {f"logged {name}": value for name, value in _list_logged_once(facts).items()}
    settings["image"] = run.image_id or run.image or NOT_RECORDED
    settings["git commit"] = (code.commit or "none") if code else NOT_RECORDED
    settings["uncommitted changes"] = NOT_RECORDED
    if code and code.dirty is not None:
        settings["uncommitted changes"] = ", ".join(code.changed) if code.dirty else "none"
    # A tracker's id of the run always differs.
    variables = {k: v for k, v in (code.env if code else {}).items() if v != run.id}
    settings |= {f"variable {key}": value for key, value in variables.items()}
    return settings | _describe_server(facts)


def _describe_server(facts: ReportFacts) -> dict[str, str]:
    machine, bill = facts.machine or ServerHardware(), facts.bill
    gpus = ", ".join(gpu.name for gpu in machine.gpus if gpu.name)
    kind = " ".join(filter(None, [bill.provider, bill.type, "spot" if bill.spot else ""]))
    return {
        "server": kind or NOT_RECORDED,
        "GPU": NOT_RECORDED if facts.machine is None else gpus or "none",
        "data set": facts.evaluation.data_sha256[:12] if facts.evaluation else NOT_RECORDED,
    }


def _list_logged_once(facts: ReportFacts) -> Mapping[str, str]:
    """Return the scalars that were logged a single time, such as a batch size that was chosen."""
    once = [series for series in facts.scalars.series if len(series.values) == 1]
    settings = [series for series in once if not is_result(metric_name(series.tag))]
    return {series.tag: number(series.values[0]) for series in settings}


def parse_command(words: Sequence[str]) -> dict[str, str]:
    """Split a command into its options, by name, and `command`, the rest.

    An option's value is after `=`, or the next word unless that is an option too.
    """
    settings: dict[str, str] = {}
    rest: list[str] = []
    last = ""
    for word in words:
        if word.startswith("-") and len(word) > 1 and not _NUMBER.match(word):
            name, equals, value = word.partition("=")
            settings[name] = value if equals else "yes"
            last = "" if equals else name
        elif last:
            settings[last], last = word, ""
        else:
            rest.append(word)
    return {"command": " ".join(rest), **settings}
