"""Command lines of Slurm, and what it prints: the texts are those of Slurm 22.05."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import msgspec
import pytest

from labctl.agent.reply import Failure
from labctl.agent.runs import node_access, slurm_attempts, slurm_commands, slurm_executor
from labctl.agent.runs.executor import Environment, NewAttempt
from labctl.agent.runs.slurm_commands import GpuLimit, SlurmJob
from labctl.agent.runs.slurm_reasons import describe_reason
from labctl.commands import slurm
from labctl.commands.slurm import LabClaim, LabJob, Partition
from labctl.wire.runs import SLURM, JobRequest, RunSpec, SlurmAttemptRecord

SPEC = RunSpec("night", "digits", "0f1e2d3c4b5a", ("python", "train.py"), "", {}, executor=SLURM)
JOB = JobRequest(
    partition="gpu",
    account="ml2026",
    qos="student",
    time_s=7200,
    gpus="gpu:a100:2",
    options={"constraint": "a100|h100"},
)
LIMITS = """\
Current Association Manager state
QOS Records
QOS=student(2) UsageRaw=0.0 GrpTRES=cpu=N(1),gres/gpu=8(3) MaxWallPJ=30 Account Limits= \
ml2026={MaxJobsPA=N(1) MaxTRESPA=cpu=N(1),gres/gpu=4(2)} User Limits= \
1000={MaxJobsPU=N(1) MaxTRESPU=cpu=N(1),gres/gpu=1(1)}
Association Records
ClusterName=lab Account=root UserName= GrpTRES=cpu=N(1),gres/gpu=N(1) MaxJobs=
ClusterName=lab Account=ml2026 UserName= GrpTRES=cpu=N(1),gres/gpu=2(2) MaxJobs=
"""


def test_a_submission_names_its_job_and_can_be_found_again() -> None:
    words = slurm_commands.build_sbatch_words(
        "labctl-digits-night-1-ab12cd", SPEC._replace(job=JOB), Path("/c"), Path("/l%j"), Path("/b")
    )
    assert words == [
        *("sbatch", "--parsable", "--job-name=labctl-digits-night-1-ab12cd"),
        *("--comment=labctl:0f1e2d3c4b5a", "--requeue", "--open-mode=append"),
        *("--signal=B:TERM@120", "--export=ALL", "--chdir=/c", "--output=/l%%j"),
        *("--partition=gpu", "--account=ml2026", "--qos=student", "--time=120:00"),
        *("--gres=gpu:a100:2", "--constraint=a100|h100", "/b"),
    ]


def test_limits_of_the_lab_are_those_of_its_job_and_a_short_job_is_warned_later() -> None:
    spec = SPEC._replace(job=JobRequest(time_s=60), memory_bytes=10**9, cpus=1.5)
    words = slurm_commands.build_sbatch_words("n", spec, Path("/c"), Path("/l"), Path("/b"))
    assert {"--mem=954M", "--cpus-per-task=2", "--time=1:00", "--signal=B:TERM@15"} <= set(words)
    assert not [word for word in words if word.startswith(("--gres", "--partition", "--qos"))]


@pytest.mark.parametrize(
    ("output", "job_id"),
    [("17\n", "17"), ("17;hpc\n", "17"), ("", ""), ("Submitted batch job 1", "")],
)
def test_the_id_of_a_job_is_the_first_field(output: str, job_id: str) -> None:
    assert slurm_commands.parse_job_id(output) == job_id


def test_the_queue_has_waiting_running_and_ended_jobs() -> None:
    jobs = slurm_commands.parse_queue(
        "8|n-1|FAILED|NonZeroExitCode|768|1795822689|normal|ml2026|\n"
        "9|n-2|PENDING|PartitionTimeLimit|0|N/A|normal|ml2026|\n"
        "10|n-3|CANCELLED|None|15|1795822639|normal|ml2026|\n"
        "slurm_load_jobs error\n"
    )
    assert jobs == [
        SlurmJob("8", "n-1", "FAILED", "NonZeroExitCode", 3, 1795822689.0, "normal", "ml2026"),
        SlurmJob("9", "n-2", "PENDING", "PartitionTimeLimit", 0, None, "normal", "ml2026"),
        SlurmJob("10", "n-3", "CANCELLED", "None", 143, 1795822639.0, "normal", "ml2026"),
    ]


def test_the_accounting_has_jobs_that_the_queue_has_dropped() -> None:
    jobs = slurm_commands.parse_accounting(
        "8|n-1|FAILED|3:0|1795822689\n"
        "5|n-2|CANCELLED by 1000|0:15|1795822639\n"
        "6|n-3|OUT_OF_MEMORY|0:125|1795822640\n"
    )
    assert jobs == [
        SlurmJob("8", "n-1", "FAILED", "", 3, 1795822689.0),
        SlurmJob("5", "n-2", "CANCELLED", "", 143, 1795822639.0),
        SlurmJob("6", "n-3", "OUT_OF_MEMORY", "", 253, 1795822640.0),
    ]


@pytest.mark.parametrize(
    ("reason", "limit", "words"),
    [
        ("QOSMaxGRESPerUser", GpuLimit(1, 1), "you already use 1 of 1 GPUs"),
        ("MaxGRESPerAccount", GpuLimit(2, 4), "your group already uses 2 of 4 GPUs"),
        ("QOSGrpGRES", GpuLimit(3, 8), "your group already uses 3 of 8 GPUs"),
        ("AssocGrpGRES", GpuLimit(2, 2), "your group already uses 2 of 2 GPUs"),
    ],
)
def test_a_limit_on_gpus_is_shown_with_its_numbers(
    reason: str, limit: GpuLimit, words: str
) -> None:
    job = SlurmJob("1", "n", "PENDING", reason, qos="student", account="ml2026")
    assert slurm_commands.parse_gpu_limit(LIMITS, job, 1000) == limit
    assert describe_reason(reason, limit) == f"waiting: {words}"
    assert slurm_commands.parse_gpu_limit("", job, 1000) is None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("Resources", "waiting: all the machines that fit are in use"),
        ("Priority", "waiting: other jobs are before it"),
        (
            "QOSGrpNodeLimit",
            "waiting: your group already uses all that it may use at once (QOSGrpNodeLimit)",
        ),
        (
            "ReqNodeNotAvail, UnavailableNodes:gpu2",
            "waiting: machines that it needs are down or reserved "
            "(ReqNodeNotAvail, UnavailableNodes:gpu2)",
        ),
        (
            "ReqNodeNotAvail, Reserved for maintenance",
            "waiting: the machines are, or will soon be, reserved for others; a shorter `time` may "
            "help",
        ),
        ("SchedDefer", "waiting: Slurm says SchedDefer"),
    ],
)
def test_reasons_are_words_and_unknown_ones_are_shown_as_they_are(code: str, words: str) -> None:
    assert describe_reason(code) == words


def describe(job: SlurmJob, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    monkeypatch.setenv("HOME", str(folder))
    record = SlurmAttemptRecord("night", "0f1e2d3c4b5a", "/r", job.name, 0.0, job.id)
    program = slurm_executor.describe_program("digits-night-1", record, job)
    return program.status, program.exit_code, program.is_out_of_memory, program.summary


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("PENDING", ("queued", 0, False, "waiting: it was just submitted")),
        ("COMPLETING", ("running", 0, False, "")),
        ("RUNNING", ("running", 0, False, "")),
        ("COMPLETED", ("ended", 7, False, "")),
        ("FAILED", ("ended", None, False, "Slurm could not start it: BadConstraints")),
        ("OUT_OF_MEMORY", ("ended", 7, True, "")),
        ("TIMEOUT", ("ended", None, False, "it reached the time limit of its job")),
        ("NODE_FAIL", ("ended", None, False, "its machine failed")),
        ("PREEMPTED", ("ended", None, False, "Slurm gave its place to another job")),
        ("CANCELLED", ("ended", None, False, "its job was canceled outside of labctl")),
    ],
)
def test_each_state_of_a_job_is_one_of_a_program(
    state: str, expected: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = SlurmJob("4", "n", state, "BadConstraints" if state == "FAILED" else "None", 7)
    assert describe(job, tmp_path, monkeypatch) == expected


def test_a_script_without_its_attempt_does_nothing(tmp_path: Path) -> None:
    """A submission that arrives after labctl has given it up must not start a second training."""
    spec = SPEC._replace(command=("touch", str(tmp_path / "began")))
    attempt = NewAttempt("digits-night-1", tmp_path, tmp_path / "run", spec, Environment())
    (tmp_path / "run" / "logs").mkdir(parents=True)
    script = tmp_path / "batch.sh"
    script.write_text(slurm_attempts.build_batch_script(tmp_path / "gone", attempt))
    assert subprocess.run(["sh", str(script)], check=False).returncode == 125
    assert not (tmp_path / "began").exists()


@pytest.mark.parametrize(("code", "refused"), [(0, False), (1, True)])
def test_the_log_says_whether_slurm_has_queued_the_job_again(
    code: int, refused: bool, tmp_path: Path
) -> None:
    save = 'trap "echo weights >checkpoints/model; exit 143" TERM; touch ready; '
    wait = "while :; do sleep 0.1; done"
    run, directory, programs = (tmp_path / name for name in ("run", "attempt", "bin"))
    for path in (run / "logs", run / "checkpoints", run / ".labctl", directory, programs):
        path.mkdir(parents=True)
    spec = SPEC._replace(command=("sh", "-c", f"cd {run}; {save}{wait}"))
    attempt = NewAttempt("digits-night-1", tmp_path, run, spec, Environment())
    (directory / "batch.sh").write_text(slurm_attempts.build_batch_script(directory, attempt))
    (directory / "enter.sh").write_text('exec "$@"\n')
    for name, line in (
        ("squeue", "echo RUNNING"),
        ("scontrol", f"echo refused >&2; exit {code}"),
        ("setsid", "exit 0"),
        ("sleep", 'case $1 in 60) exit 0 ;; *) exec /bin/sleep "$1" ;; esac'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    environ = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "HOME": str(tmp_path)}
    with subprocess.Popen(["sh", str(directory / "batch.sh")], env=environ) as job:
        while not (run / "ready").exists():
            time.sleep(0.05)
        os.utime(directory / "began", (1, 1))  # the checkpoint is newer
        job.terminate()
        assert job.wait(60) == 143
    log = (run / "logs" / "run.log").read_text()
    assert ("Slurm did not queue job 7 again: refused" in log) == refused
    assert "is queued again" not in log


def test_a_claim_is_written_once_and_found_again(tmp_path: Path) -> None:
    claim = LabClaim(token="a" * 16, lab="digits", lab_id="0f1e2d3c4b5a", created_at=7.5)
    later = msgspec.structs.replace(claim, created_at=8.5)

    def run(script: str) -> str:
        words = ["sh", "-c", script]
        environ = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        return subprocess.run(words, env=environ, check=True, capture_output=True, text=True).stdout

    assert slurm.parse_claims(run(slurm.LIST_CLAIMS)) == []
    for each in (claim, later):
        assert slurm.parse_claims(run(slurm.build_claim(each))) == [claim]
    assert slurm.parse_claims(run(slurm.LIST_CLAIMS)) == [claim]


def test_only_the_directory_of_the_lab_is_removed(tmp_path: Path) -> None:
    for name, lab_id in (("digits", "another"), ("digits-0f1e2d", "0f1e2d3c4b5a")):
        (tmp_path / "labctl" / name / ".labctl").mkdir(parents=True)
        (tmp_path / "labctl" / name / ".labctl" / "id").write_text(lab_id)
    script = slurm.build_removal("digits", "0f1e2d3c4b5a")
    environ = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    subprocess.run(["sh", "-c", script], env=environ, check=True)
    assert [path.name for path in (tmp_path / "labctl").iterdir()] == ["digits"]


def test_the_directory_of_labs_is_where_the_base_says_and_nowhere_else(tmp_path: Path) -> None:
    claim = LabClaim(token="ab" * 8, lab="digits", lab_id="0f1e2d3c4b5a", created_at=1.0)

    def run(script: str) -> subprocess.CompletedProcess[str]:
        environ = {"HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"}
        words = ["sh", "-c", script]
        return subprocess.run(words, env=environ, capture_output=True, text=True, check=False)

    (tmp_path / "home").mkdir()
    base = f"{tmp_path}/scratch/$USER/labs"
    for _ in range(2):
        assert slurm.parse_claims(run(slurm.build_claim(claim, base)).stdout) == [claim]
    (labs,) = (tmp_path / "scratch").glob("*/labs")
    assert (tmp_path / "home" / "labctl").readlink() == labs
    assert labs.stat().st_mode & 0o777 == 0o700
    refused = run(slurm.build_claim(claim, "~/elsewhere"))
    assert (refused.returncode, refused.stderr.strip()) == (slurm.OTHER_BASE, str(labs))
    (labs / ".slurm" / f"{claim.token}.json").unlink()
    run(slurm.build_removal("digits", "0f1e2d3c4b5a"))
    assert not labs.exists()
    assert not (tmp_path / "home" / "labctl").is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a directory away")
def test_a_base_that_somebody_else_made_first_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    claim = LabClaim(token="ab" * 8, lab="digits", lab_id="0f1e2d3c4b5a", created_at=1.0)
    environ = {"HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"}
    words = ["sh", "-c", slurm.build_claim(claim, str(tmp_path))]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (slurm.FOREIGN_BASE, "nobody")
    assert list(tmp_path.iterdir()) == []


def test_the_jobs_of_labs_are_known_by_their_comments() -> None:
    jobs = slurm.parse_jobs(
        "7|RUNNING|labctl:0f1e2d\n8|PENDING|(null)\n9|RUNNING|labctl\n10|COMPLETING|labctl:a\n"
    )
    assert jobs == [LabJob(id="7", state="RUNNING", lab_id="0f1e2d")]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("accounting_storage/slurmdbd", True),
        ("accounting_storage/none", False),
        ("(null)", False),
    ],
)
def test_a_cluster_may_have_no_accounting(value: str, expected: bool) -> None:
    config = f"AccountingStorageTRES   = cpu\nAccountingStorageType   = {value}\n"
    assert slurm_commands.has_accounting(config) == expected


def test_partitions_have_free_and_all_gpus() -> None:
    partitions = slurm.parse_partitions(
        "cpu|idle|64|256000|(null)|gpu:0|\n"
        "gpu*|mix|4|4000|gpu:t4:2|gpu:t4:1(IDX:0)|\n"
        "gpu*|idle|8|8000|gpu:t4:2|gpu:t4:0(IDX:N/A)|\n"
        "gpu*|down*|4|4000|gpu:t4:2|gpu:t4:0(IDX:N/A)|\n"
    )
    mib = 1024**2
    assert partitions == [
        Partition(
            name="gpu",
            is_default=True,
            machines=3,
            cpus=8,
            memory_bytes=8000 * mib,
            gpu_name="T4",
            gpus=2,
            all_gpus=6,
            free_gpus=3,
        ),
        Partition(name="cpu", machines=1, cpus=64, memory_bytes=256000 * mib),
    ]
    text = "gpu: 3 of 6 GPUs free; cpu: 1 machine without GPUs"
    assert slurm.describe_free(partitions) == text


def test_only_a_key_may_enter_the_machine_of_a_job_and_it_opens_no_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "labctl").mkdir()
    with pytest.raises(Failure, match="no public key"):
        node_access.build_node_access("7", "night", 'command="sh" ssh-ed25519 AAAA')
    for key in ("ssh-ed25519 AAAA laptop", "ssh-ed25519 AAAA laptop", "ssh-ed25519 BBBB\nx"):
        access = node_access.build_node_access("7", "night", key)
    assert access.command.startswith("srun --quiet --overlap --nodes=1 --ntasks=1 --relative=0")
    assert access.host_key.startswith("ssh-ed25519 ")
    directory = tmp_path / "labctl" / ".node-access"
    assert (directory / "authorized_keys").read_text() == (
        "restrict,port-forwarding ssh-ed25519 AAAA\nrestrict,port-forwarding ssh-ed25519 BBBB\n"
    )
    assert directory.stat().st_mode & 0o777 == 0o700
    config = (directory / "sshd_config").read_text()
    assert "PermitOpen localhost:* 127.0.0.1:*\n" in config
