"""What every test stands on."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

# Here, since OpenMP reads it when the first test file imports PyTorch. With another number of
# threads sums are rounded otherwise; and of small pictures they make more work than they share.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Projects that the documentation shows; one has tests of its own.
collect_ignore = ["guide"]

# For workers side by side: files that share what takes long to make, and what is begun first.
#
# A file that is not named stands alone, after these.
TOGETHER_LONGEST_FIRST = (
    "e2e/test_twenty_reclaims",
    # One lab with services, and what a browser shows of them.
    "e2e/test_forwards_live e2e/test_services e2e/test_serve_live e2e/test_browser "
    "e2e/test_watchdog_jupyter e2e/test_student_services",
    "e2e/test_image_cache_live",
    "e2e/test_run_up_down_live",
    "e2e/test_prepare_live",
    "e2e/test_evaluation_there",
    "e2e/test_shared_server e2e/test_shared_limits",
    "e2e/test_shared_class",
    "e2e/test_dashboard_browser",
    "e2e/test_student_page_live",
    "e2e/test_prepare_accounts",
    "e2e/test_transfer_faults",
    "e2e/test_aws_kills e2e/test_aws_faults e2e/test_aws_gang e2e/test_first_deadline",
    "e2e/test_course_budget_end",
    "e2e/test_aws_machines e2e/test_kept_disks e2e/test_reclaim e2e/test_keeper",
    # One process that has imported PyTorch, and all the digits.
    "template/test_template_train template/test_template_kills template/test_template_checkpoints "
    "template/test_template_profile template/test_template_batch_size "
    "template/test_template_learner template/test_template_findings "
    "template/test_template_predict template/test_template_prepare_data",
    "e2e/test_watchdog",
    "e2e/test_gang",
    "e2e/test_gang_wireguard",
    "e2e/test_store e2e/test_recover",
    "e2e/test_connection_faults",
    "e2e/test_grading_live e2e/test_hidden_tests_live",
    "e2e/test_course_keeper e2e/test_course_check",
    "e2e/test_course_keeper_kills",
    # One lab made by `labctl up`.
    "e2e/test_runs e2e/test_run_faults e2e/test_gpu e2e/test_clocks",
    "e2e/test_systemd e2e/test_systemd_gpu",
    "e2e/test_slurm_class",
    "e2e/test_slurm_class_containers",
    "e2e/test_slurm_cluster_class",
    "e2e/test_slurm_playbook",
    "e2e/test_slurm_runs e2e/test_slurm_containers",
    "e2e/test_lab_server",
    "rehearsal/test_machines rehearsal/test_rehearsed",
    "contract/test_contract contract/test_aws",
    "e2e/test_sync",
    "e2e/test_transports",
    "e2e/test_static_leases",
    "contract/test_local",
)


def pytest_configure() -> None:
    # A shell's background job ignores Ctrl-C, and so would every program that a test starts and
    # interrupts: an ignored signal stays ignored in what is executed, a handler does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # An example takes as long as the machine is busy.
    settings.register_profile("labctl", deadline=None)
    settings.load_profile("labctl")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without looking for garbage: there is none, and each worker would look for 2 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note_failure(report, "FAILED", str(report.when))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note_failure(report, "ERROR", "collection")


def _note_failure(report: pytest.TestReport | pytest.CollectReport, kind: str, when: str) -> None:
    """Append a failure to the file that LABCTL_TEST_FAILURES names: scripts/test reads it."""
    path = os.environ.get("LABCTL_TEST_FAILURES")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(path).open("a") as file:
            file.write(f"=== {kind} {report.nodeid} ({when})\n{report.longreprtext}\n\n")


def unit_of_work(nodeid: str) -> str:
    """The name of what one worker does from beginning to end; `nodeid` as pytest shows it."""
    file = nodeid.partition("::")[0].removeprefix("tests/").removesuffix(".py")
    return next((unit for unit in TOGETHER_LONGEST_FIRST if file in unit.split()), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """Give whole files to each worker, since their tests share what they made.

    With --dist worksteal, single tests.
    """
    from xdist.scheduler import LoadScopeScheduling

    if config.option.dist == "worksteal":
        return None

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of_work(nodeid)

    config.option.loadscopereorder = False
    return ByUnit(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):
        return
    ranks = {unit: rank for rank, unit in enumerate(TOGETHER_LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(unit_of_work(item.nodeid), len(ranks)))
