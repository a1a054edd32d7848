"""What is saved, and what becomes of a disk: pulled.json, a real EC2 interface (moto), the rule."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from labctl.agent.mirror import boto3_python
from labctl.agent.reply import Failure
from labctl.agent.watchdog import disk as watch_disk
from labctl.agent.watchdog import poweroff, saved_results, shutdown, watchdog
from labctl.agent.watchdog.activity import LabAccount, _describe_kernel
from labctl.agent.watchdog.install import _merge_limits, start_script
from labctl.agent.watchdog.jupyter_objects import JupyterKernel
from labctl.agent.watchdog.limits import LimitsFile
from labctl.agent.watchdog.mirroring import error_text
from labctl.agent.watchdog.processes import name_transfer
from labctl.agent.watchdog.saved_results import Unsaved
from labctl.agent.watchdog.shutdown import ShutdownPlan, should_end
from labctl.agent.watchdog.systemd_unit import build_unit_text
from labctl.servers.agent import list_program_files
from labctl.wire.codec import to_json
from labctl.wire.files import PulledEdit, PulledFile, PulledRequest
from labctl.wire.watchdog import (
    EndingRecord,
    GuardLimits,
    GuardRequest,
    KeepDiskReply,
    KeepDiskRequest,
    LimitsRecord,
)

boto3 = pytest.importorskip("boto3")
pytest.importorskip("moto.server")

LAB = {"lab": "digits", "lab_id": "0f1e2d3c4b5a"}
REGION = "us-east-1"


@pytest.fixture(scope="module")
def cloud() -> Iterator[str]:
    from aws_cloud import forget_rehearsals
    from moto.server import ThreadedMotoServer

    with pytest.MonkeyPatch.context() as patch:
        forget_rehearsals(patch)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
        server.stop()


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))


def client(name: str, cloud: str) -> Any:
    return boto3.client(name, endpoint_url=cloud, region_name=REGION)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class _Metadata(BaseHTTPRequestHandler):
    """The part of EC2's metadata service that is asked; the real one requires tokens too."""

    instance = ""

    def do_PUT(self) -> None:
        self._say("token")

    def do_GET(self) -> None:
        assert self.headers["X-aws-ec2-metadata-token"] == "token"
        last = self.path.rpartition("/")[2]
        self._say({"instance-id": self.instance, "region": REGION}[last])

    def _say(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def imds() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Metadata)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_has_its_own_disk_kept(cloud: str, credentials: None, imds: str) -> None:
    ec2 = client("ec2", cloud)
    image = ec2.describe_images()["Images"][0]["ImageId"]
    made = ec2.run_instances(ImageId=image, MinCount=1, MaxCount=1, InstanceType="t3.micro")
    _Metadata.instance = made["Instances"][0]["InstanceId"]
    request = KeepDiskRequest(expires=1_900_000_000, imds=imds, endpoint=cloud)
    watch_disk.keep_disk(request._replace(probe=True))

    def disk() -> tuple[str, bool, dict[str, str]]:
        found = ec2.describe_instances(InstanceIds=[_Metadata.instance])
        ebs = found["Reservations"][0]["Instances"][0]["BlockDeviceMappings"][0]["Ebs"]
        volume = ec2.describe_volumes(VolumeIds=[ebs["VolumeId"]])["Volumes"][0]
        tags = {tag["Key"]: tag["Value"] for tag in volume.get("Tags", [])}
        return ebs["VolumeId"], ebs["DeleteOnTermination"], tags

    volume, _, tags = disk()
    assert tags == {}, "a probe changes nothing"
    assert watch_disk.keep_disk(request) == KeepDiskReply((volume,))
    assert disk()[2] == {"labctl:expires": "1900000000"}


def test_a_machine_without_metadata_says_so(credentials: None) -> None:
    with pytest.raises(Failure, match="does not answer"):
        watch_disk.keep_disk(KeepDiskRequest(1.0, imds="http://127.0.0.1:9"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in list_program_files():
        path = tmp_path / "program" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    monkeypatch.setattr(saved_results, "PROGRAM", tmp_path / "program")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    own = tmp_path / "labctl" / "digits" / "runs" / "first" / ".labctl"
    own.mkdir(parents=True)
    (tmp_path / "labctl" / "digits" / ".labctl").mkdir()
    (tmp_path / "labctl" / "digits" / ".labctl" / "id").write_text(LAB["lab_id"])
    spec = {"outputs": ["checkpoints"], "lab_id": LAB["lab_id"], "command": [], "image": ""}
    (own / "spec.json").write_text(json.dumps(spec))
    (own / "record.json").write_text(json.dumps({"id": "first", "state": "exited"}))
    for name, content in (("logs/run.log", "log"), ("checkpoints/a", "aa"), ("code/model", "mmm")):
        path = own.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path


def names(left: Unsaved) -> set[str]:
    return {file.name for file in left.files}


def test_an_output_may_be_a_file(home: Path) -> None:
    spec = home / "labctl/digits/runs/first/.labctl/spec.json"
    spec.write_text(json.dumps({**json.loads(spec.read_text()), "outputs": ["code/model"]}))
    assert saved_results.estimate_unsaved(LAB["lab_id"], False) == (3, 8)


def test_what_is_pulled_is_saved_until_it_changes(home: Path) -> None:
    account = LabAccount(os.geteuid(), os.getegid())
    (home / "labctl" / "digits" / "code").mkdir()
    (home / "labctl" / "digits" / "code" / "edited.py").write_text("edit")
    left = saved_results.list_unsaved(account, LAB["lab_id"], False)
    assert names(left) == {"logs/run.log", "checkpoints/a", "code/model", "edited.py"}
    assert {f.key for f in left.files} >= {
        "digits-0f1e2d3c4b5a/runs/first/files/checkpoints/a",
        "digits-0f1e2d3c4b5a/server-edits/edited.py",
    }
    assert saved_results.estimate_unsaved(LAB["lab_id"], False) == (2, 5)
    held = tuple(PulledFile(f.name, f.size, f.sha256) for f in left.files if f.name != "edited.py")
    edits = tuple(PulledEdit(f.name, f.sha256) for f in left.files if f.name == "edited.py")
    saved_results.record_pulled(PulledRequest(**LAB, runs={"first": held}, edits=edits))
    assert saved_results.list_unsaved(account, LAB["lab_id"], True) == Unsaved([], [])
    assert saved_results.estimate_unsaved(LAB["lab_id"], True) == (0, 0)
    (home / "labctl/digits/runs/first/checkpoints/a").write_text("bb")
    assert names(saved_results.list_unsaved(account, LAB["lab_id"], False)) == {"checkpoints/a"}
    (home / "labctl/digits/runs/first/checkpoints/manifest.json").write_text(
        json.dumps({"files": {"b": {"size": 1}}})
    )
    left = saved_results.list_unsaved(account, LAB["lab_id"], False)
    assert any("its manifest does not match b" in each for each in left.broken)
    with pytest.raises(Failure, match="run other does not exist"):
        saved_results.record_pulled(PulledRequest(**LAB, runs={"other": ()}))


@pytest.mark.parametrize("comes", [True, False])
def test_at_a_limit_it_waits_for_the_keeper_and_not_beyond_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    monkeypatch.setattr(shutdown, "SAVED_POLL_S", 0.1)
    account = LabAccount(os.geteuid(), os.getegid())
    plan = ShutdownPlan(account, "", "poweroff", "goes", "", "", 1.0, saver_s=60.0)
    said: list[str] = []

    def say(what: str, why: str) -> None:
        said.append(what)
        if what == "waiting for the keeper" and comes:
            left = saved_results.list_unsaved(account, LAB["lab_id"], False)
            held = tuple(PulledFile(one.name, one.size, one.sha256) for one in left.files)
            saved_results.record_pulled(PulledRequest(**LAB, runs={"first": held}))

    assert shutdown.wind_down(plan, "budget", say, left_s=60.0 if comes else 0.5).end
    assert said[-1] == ("results saved" if comes else "results lost")
    assert "waiting for the keeper" in said or not comes
    # An idle server has time: it stays on, and nobody is waited for.
    if not comes:
        assert not shutdown.wind_down(plan, "idle", say, left_s=60.0).end
        assert said[-1] == "staying on"


@pytest.mark.parametrize(
    ("by", "only_here", "disk_safe", "ends"),
    [
        ("idle", False, False, True),
        ("idle", True, True, True),
        ("idle", True, False, False),
        ("ttl", True, False, True),
        ("budget", True, False, True),
        ("ttl", False, False, True),
    ],
)
def test_the_rule_for_results_that_are_only_here(
    by: str, only_here: bool, disk_safe: bool, ends: bool
) -> None:
    assert should_end(by, only_here, disk_safe) is ends


def test_a_problem_that_somebody_repaired_is_shown_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a bucket that was created after `labctl up`: the next check is a minute later."""
    problems = ["results cannot be sent to s3://b/p: NoSuchBucket"]
    monkeypatch.setattr(watchdog, "find_unsavable", lambda plan: list(problems))
    monkeypatch.setattr(watchdog, "ESTIMATE_EVERY_S", 0.01)
    limits = GuardLimits()
    request = GuardRequest(
        **LAB, server_id="srv", limits=limits, ending=EndingRecord("poweroff"), store="s3://b/p",
        uid=os.getuid(), gid=os.getgid(), home=str(tmp_path),
    )  # fmt: skip
    LimitsFile(tmp_path).write(_merge_limits(None, request))
    watching = watchdog.Watchdog(tmp_path, "1")
    watching.limits_file.reload()
    threading.Thread(target=watching._explore, daemon=True).start()
    for expected in (list(problems), []):
        deadline = time.monotonic() + 10
        while watching.cannot != expected:
            assert time.monotonic() < deadline, watching.cannot
            time.sleep(0.01)
        problems.clear()
    decisions = (tmp_path / "decisions.jsonl").read_text().splitlines()
    assert [json.loads(line)["what"] for line in decisions] == ["results at risk", "results safe"]


def test_without_boto3_it_says_so_beforehand(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boto3_python, "PYTHONS", ("no-such-python",))
    account = LabAccount(os.geteuid(), os.getegid())
    plan = ShutdownPlan(account, LAB["lab_id"], "poweroff", "keepable", "s3://b/p", "", 1.0)
    said = shutdown.find_unsavable(plan)
    assert [each.partition(":")[0] for each in said] == [
        "results cannot be sent to s3",
        "the disk cannot be kept after this server",
    ]
    assert "it was not prepared on this server" in said[0]
    assert said[0].count("s3://b/p") == 1
    assert "no Python on the server has boto3" in said[1]
    assert shutdown.find_unsavable(plan._replace(store="", disk="stays")) == []


@pytest.mark.parametrize(
    ("owner", "given"),
    [
        ({"token": "aa11", "lab_id": "mine"}, True),
        ({"token": "bb22", "lab_id": "mine"}, False),
        ({"token": "aa11", "lab_id": "other"}, False),
        ({}, False),
    ],
)
def test_only_our_own_lease_is_given_back(
    tmp_path: Path, owner: dict[str, str], given: bool
) -> None:
    for number in (1, 2):
        (tmp_path / f"lease-{number}").mkdir()
    (tmp_path / "lease-1" / "owner.json").write_text(
        json.dumps({"token": "aa11", "lab_id": "mine"})
    )
    (tmp_path / "lease-2" / "owner.json").write_text(json.dumps(owner))
    assert poweroff.release_lease("static-gpu1-aa11", "mine", tmp_path) is given
    assert (tmp_path / "lease-2" / "released").exists() is given
    assert not (tmp_path / "lease-1" / "released").exists()


@pytest.mark.parametrize(
    ("name", "words", "transfer"),
    [
        ("rsync", ["rsync", "--server"], "rsync"),
        ("sshd", ["sshd: student@internal-sftp"], "sftp"),
        ("sshd-session", ["sshd-session: student@pts/0"], ""),
        ("sshd", [], ""),
        (
            "python3",
            ["python3", "-I", "/h/.cache/labctl/remote-1/__main__.py", "send"],
            "labctl send",
        ),
        ("python3", ["python3", "train.py"], ""),
    ],
)
def test_what_a_process_transfers_with(name: str, words: list[str], transfer: str) -> None:
    assert name_transfer(name, words) == transfer


def test_a_kernel_at_rest_ages() -> None:
    last = "2026-01-02T03:04:05.678901Z"
    at = 1767323045.0
    assert _describe_kernel(JupyterKernel("busy", last), at + 900).age_s == 0
    assert _describe_kernel(JupyterKernel("idle", last), at + 900).age_s == 900


def arm(
    recorded: LimitsRecord | None, limits: GuardLimits, elapsed_s: float, server_id: str = "i-1"
) -> LimitsRecord:
    request = GuardRequest(
        **LAB,
        server_id=server_id,
        limits=limits,
        ending=EndingRecord("poweroff"),
        elapsed_s=elapsed_s,
        uid=1,
        gid=1,
        home="/h",
    )
    return _merge_limits(recorded, request)


def test_a_second_arming_forgets_nothing() -> None:
    first = arm(None, GuardLimits(ttl_s=100), 60)
    first = first._replace(limits=first.limits._replace(extended_s=50.0))
    again = arm(first, GuardLimits(ttl_s=200), 0)
    assert again.age.elapsed_s >= 60
    assert (again.limits.ttl_s, again.limits.extended_s) == (200, 50.0)
    assert again.edition == first.edition + 1
    other = arm(again, GuardLimits(ttl_s=200), 0, server_id="i-2")
    assert (other.age.elapsed_s, other.limits.extended_s) == (0.0, 0.0)
    assert other.edition == again.edition + 1


def test_a_default_ttl_begins_now_on_a_server_that_had_none() -> None:
    default = GuardLimits(ttl_s=43_200, ttl_is_default=True)
    new = arm(None, default, 60)
    assert new.limits.from_s == 0.0
    # It goes on counting, also beyond its own length where it was extended.
    extended = new._replace(limits=new.limits._replace(extended_s=86_400.0))
    assert arm(extended, default, 50_000).limits.from_s == 0.0
    for earlier in (arm(None, GuardLimits(), 100_000), None):
        late = arm(earlier, default, 100_000).limits
        assert late.from_s == pytest.approx(100_000, abs=60)
    asked = arm(arm(None, GuardLimits(), 100), GuardLimits(ttl_s=43_200), 100_000)
    assert asked.limits.from_s == 0.0


def test_a_default_ttl_replaces_no_limit_that_the_server_was_given() -> None:
    """`labctl up --ttl 48h`, a day of training, and a plain `labctl up`."""
    default = GuardLimits(ttl_s=43_200, ttl_is_default=True, price_usd_per_hour=0.5)

    def after_a_day(given: GuardLimits, asked: GuardLimits) -> LimitsRecord:
        return arm(arm(None, given, 60), asked, 86_400)

    limits = after_a_day(GuardLimits(ttl_s=172_800), default).limits
    assert (limits.ttl_s, limits.from_s) == (172_800, 0.0)
    budget = GuardLimits(budget_usd=20.0, budget_whole_usd=20.0)
    record = after_a_day(budget, default)
    assert (record.limits.budget_usd, record.limits.ttl_s) == (20.0, None)
    assert record.budget_whole_usd == 20.0
    # On a server without a price there is no default, and a plain `up` keeps the limit as well.
    limits = after_a_day(GuardLimits(ttl_s=172_800), GuardLimits(ttl_is_default=True)).limits
    assert (limits.ttl_s, limits.from_s) == (172_800, 0.0)
    free = GuardLimits(ttl_is_default=True)
    assert arm(arm(None, free, 60), free, 500).limits.from_s == 0.0
    # What is asked for by name still replaces it.
    assert after_a_day(GuardLimits(ttl_s=172_800), GuardLimits(ttl_s=90_000)).limits.ttl_s == 90_000
    declined = after_a_day(budget, GuardLimits()).limits
    assert (declined.ttl_s, declined.budget_usd) == (None, None)


def test_an_idle_limit_is_replaced_by_another_one_only() -> None:
    """`labctl up --ttl 8h --idle 30m`, then a plain `labctl up` or `labctl start`."""
    first = arm(None, GuardLimits(ttl_s=28_800, idle_s=1_800), 60)
    default = GuardLimits(ttl_s=43_200, ttl_is_default=True)
    assert arm(first, default, 600).limits.idle_s == 1_800
    assert arm(first, GuardLimits(ttl_s=28_800), 600).limits.idle_s == 1_800
    assert arm(first, GuardLimits(ttl_s=28_800, idle_s=7_200), 600).limits.idle_s == 7_200
    assert arm(first, default, 600, server_id="i-2").limits.idle_s is None


def test_a_default_ttl_that_ends_within_the_hour_of_its_first_arming_begins_now() -> None:
    late = arm(None, GuardLimits(ttl_s=43_200, ttl_is_default=True), 43_000)
    assert late.limits.from_s == pytest.approx(43_000, abs=60)


def test_a_damaged_limits_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    path.write_text(json.dumps(to_json(arm(None, GuardLimits(ttl_s=100), 60))))
    limits_file = LimitsFile(tmp_path)
    assert limits_file.reload()
    for number, text in enumerate(("", "{", "[]", '{"edition": 7}', '{"limits": null}'), start=1):
        path.write_text(text)
        os.utime(path, (number, number))
        assert not limits_file.reload()
        assert limits_file.limits.ttl_s == 100


def test_a_ttl_that_begins_anew_keeps_what_only_a_newer_labctl_knows(tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    body = to_json(arm(None, GuardLimits(ttl_s=100), 60))
    body["limits"]["of_tomorrow_s"] = body["of_tomorrow"] = 60
    path.write_text(json.dumps(body))
    limits_file = LimitsFile(tmp_path)
    limits_file.reload()
    limits_file.restart_ttl(500.0)
    assert limits_file.limits.from_s == 500.0
    written = json.loads(path.read_text())
    assert (written["limits"]["of_tomorrow_s"], written["of_tomorrow"]) == (60, 60)


def test_the_unit_comes_back_whatever_ends_it() -> None:
    text = build_unit_text(Path("/var/lib/labctl/watchdog"))
    assert "Restart=always" in text
    assert "OOMScoreAdjust=-1000" in text
    script = start_script(Path("/place"), Path("/place/remote-1"))
    assert "while [ -f /place/remote-1/__main__.py ]" in script


def test_a_failure_and_its_cause_are_two_phrases() -> None:
    failure = Failure("store", "cannot use the store s3://b/p", "this server has no role")
    assert error_text(failure) == "cannot use the store s3://b/p: this server has no role"
