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


def parts(result):
    """(host, task, result) of a result: these have public names since ansible-core 2.19."""
    if hasattr(result, "task"):
        return result.host.get_name(), result.task.get_name(), result.result
    return result._host.get_name(), result._task.get_name(), result._result


def message(result):
    """The words that tell most about a failure: Ansible's, then the program's own."""
    texts = [result.get(key) for key in ("msg", "module_stderr", "stderr", "stdout")]
    # Of the items of a loop, and of the modules that gather facts.
    for item in [*result.get("results", []), *result.get("failed_modules", {}).values()]:
        if isinstance(item, dict) and item.get("failed"):
            texts.append(item.get("msg") or item.get("module_stderr"))
    kept = [str(text).strip() for text in texts if text and str(text).strip()]
    return "\n".join(dict.fromkeys(kept))[-4000:]


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "labctl_events"

    def say(self, event, **fields):
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()

    def v2_playbook_on_play_start(self, play):
        self.say("play", task=play.get_name(), total=count_tasks(play))

    def v2_playbook_on_task_start(self, task, is_conditional):
        self.say("task", task=task.get_name())

    def v2_playbook_on_handler_task_start(self, task):
        self.say("task", task=task.get_name())

    def ended(self, result, status):
        host, task, _ = parts(result)
        self.say("done", host=host, task=task, status=status)

    def v2_runner_on_ok(self, result):
        self.ended(result, "changed" if parts(result)[2].get("changed") else "ok")

    def v2_runner_on_skipped(self, result):
        self.ended(result, "skipped")

    def v2_runner_on_failed(self, result, ignore_errors=False):
        host, task, values = parts(result)
        if ignore_errors:
            self.ended(result, "ok")
        else:
            self.say("failed", host=host, task=task, message=message(values))

    def v2_runner_on_unreachable(self, result):
        host, task, values = parts(result)
        self.say("unreachable", host=host, task=task, message=message(values))

    def v2_playbook_on_stats(self, stats):
        for host in sorted(stats.processed):
            self.say("stats", host=host, changed=stats.summarize(host)["changed"])


def count_tasks(play):
    """How many tasks of a play will be announced: its roles' too, and the gathering of facts."""
    blocks = list(play.compile())
    count = 1 if play.gather_facts else 0
    while blocks:
        item = blocks.pop()
        if hasattr(item, "block"):
            blocks.extend(item.block)
        elif item.action not in ("meta", "ansible.builtin.meta"):
            count += 1
    return count
