"""An Ansible stdout callback: one JSON object per line, for the program that started Ansible.

Fields: `event` (play, task, done, failed, unreachable, stats), `host`, `task`, `status` (ok,
changed, skipped), `message`, `total` (tasks of the play), `changed` (number of changed tasks).
"""

from __future__ import annotations

import json
import sys

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
    name: labctl_events
    type: stdout
    short_description: Tasks as JSON lines
    description:
        - Prints one JSON object per line for every task that starts, ends or fails.
"""


def unpack_result(result):
    """Return (host, task, result). The public names exist since ansible-core 2.19."""
    if hasattr(result, "task"):
        return result.host.get_name(), result.task.get_name(), result.result
    return result._host.get_name(), result._task.get_name(), result._result


def failure_text(result):
    """Return the most useful texts about a failure: Ansible's, then the program's own."""
    texts = [result.get(key) for key in ("msg", "module_stderr", "stderr", "stdout")]
    # Failures in a loop's items and in the modules that gather facts.
    for item in [*result.get("results", []), *result.get("failed_modules", {}).values()]:
        if isinstance(item, dict) and item.get("failed"):
            texts.append(item.get("msg") or item.get("module_stderr"))
    lines = [str(text).strip() for text in texts if text and str(text).strip()]
    return "\n".join(dict.fromkeys(lines))[-4000:]


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "labctl_events"

    def write_event(self, event, **fields):
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()

    def v2_playbook_on_play_start(self, play):
        self.write_event("play", task=play.get_name(), total=count_tasks(play))

    def v2_playbook_on_task_start(self, task, is_conditional):
        self.write_event("task", task=task.get_name())

    def v2_playbook_on_handler_task_start(self, task):
        self.write_event("task", task=task.get_name())

    def report_done(self, result, status):
        host, task, _ = unpack_result(result)
        self.write_event("done", host=host, task=task, status=status)

    def v2_runner_on_ok(self, result):
        self.report_done(result, "changed" if unpack_result(result)[2].get("changed") else "ok")

    def v2_runner_on_skipped(self, result):
        self.report_done(result, "skipped")

    def v2_runner_on_failed(self, result, ignore_errors=False):
        host, task, values = unpack_result(result)
        if ignore_errors:
            self.report_done(result, "ok")
        else:
            self.write_event("failed", host=host, task=task, message=failure_text(values))

    def v2_runner_on_unreachable(self, result):
        host, task, values = unpack_result(result)
        self.write_event("unreachable", host=host, task=task, message=failure_text(values))

    def v2_playbook_on_stats(self, stats):
        for host in sorted(stats.processed):
            self.write_event("stats", host=host, changed=stats.summarize(host)["changed"])


def count_tasks(play):
    """Return the number of tasks that a play announces, with its roles and fact gathering."""
    blocks = list(play.compile())
    count = 1 if play.gather_facts else 0
    while blocks:
        item = blocks.pop()
        if hasattr(item, "block"):
            blocks.extend(item.block)
        elif item.action not in ("meta", "ansible.builtin.meta"):
            count += 1
    return count
