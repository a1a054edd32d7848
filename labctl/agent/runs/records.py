"""The records in a run's `.labctl` directory. A damaged one counts as missing."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

from ...wire.codec import to_json
from ...wire.runs import (
    DOCKER,
    AttemptRecord,
    ClaimRecord,
    DiskRestoreRecord,
    ExitRecord,
    GangMember,
    JobRequest,
    LimitRecord,
    LogOffsetRecord,
    RunRecord,
    RunSpec,
)
from ..host.paths import LIMIT, read_record, write_json, write_text


def list_attempts(directory: Path) -> list[Path]:
    """List the files of the run's attempts, the newest last."""
    return sorted((directory / ".labctl").glob("attempt-*"), key=lambda path: int(path.name[8:]))


def read_last_attempt(directory: Path) -> AttemptRecord:
    """Return the record of the run's newest attempt, `AttemptRecord()` if it has none."""
    attempts = list_attempts(directory)
    record = read_record(AttemptRecord, attempts[-1]) if attempts else None
    return record or AttemptRecord()


def write_attempt(directory: Path, number: int, record: AttemptRecord) -> None:
    write_json(directory / ".labctl" / f"attempt-{number}", to_json(record))


def read_final_record(directory: Path) -> RunRecord | None:
    """Return the record of a run that is known to have ended, None otherwise."""
    return read_record(RunRecord, directory / ".labctl" / "record.json")


def write_final_record(directory: Path, record: RunRecord) -> None:
    write_json(directory / ".labctl" / "record.json", to_json(record))


def read_claim(directory: Path) -> ClaimRecord:
    return read_record(ClaimRecord, directory / ".labctl" / "claim.json") or ClaimRecord()


def write_spec_and_claim(directory: Path, spec: RunSpec, created_at: float) -> ClaimRecord:
    """Write a run's specification, and the claim that its hash makes."""
    text = encode_spec(spec)
    claim = ClaimRecord(hashlib.sha256(text.encode()).hexdigest(), created_at)
    write_text(directory / ".labctl" / "spec.json", text)
    write_json(directory / ".labctl" / "claim.json", to_json(claim))
    return claim


def encode_spec(spec: RunSpec) -> str:
    """Encode a specification as it is stored and hashed: other bytes would be another claim."""
    body = to_json(spec)
    # Runs that an earlier version claimed keep their hash: it lacked these fields.
    if not spec.data:
        del body["data"]
    if spec.executor == DOCKER:
        del body["executor"]
    if spec.job == JobRequest():
        del body["job"]
    elif not spec.job.runtime:
        del body["job"]["runtime"]
    return json.dumps(body, sort_keys=True)


def read_member(directory: Path) -> GangMember | None:
    """Return the place of the last attempt in a run on several servers; None for any other run."""
    return read_record(GangMember, directory / ".labctl" / "gang.json")


def write_member(directory: Path, member: GangMember) -> None:
    write_json(directory / ".labctl" / "gang.json", to_json(member))


def read_exit(directory: Path) -> ExitRecord | None:
    """Return how the run's command ended, None if entry.sh has not written that."""
    return read_record(ExitRecord, directory / ".labctl" / "exit.json")


def read_reached_limit(directory: Path) -> str:
    """Return the limit that ended the run, "" for none."""
    return (read_record(LimitRecord, directory / ".labctl" / LIMIT) or LimitRecord()).by


def write_reached_limit(directory: Path, by: str) -> None:
    write_json(directory / ".labctl" / LIMIT, to_json(LimitRecord(by, time.time())))


def read_log_offset(directory: Path) -> int:
    """Return the byte of the log at which the last attempt began, 0 for a run never resumed."""
    path = directory / ".labctl" / "resumed.json"
    return (read_record(LogOffsetRecord, path) or LogOffsetRecord()).offset


def write_log_offset(directory: Path, offset: int) -> None:
    write_json(directory / ".labctl" / "resumed.json", to_json(LogOffsetRecord(offset)))


def read_restored_container(directory: Path) -> str:
    """Return the container of a run that was restored from a disk, "" for any other run."""
    path = directory / ".labctl" / "restored.json"
    return (read_record(DiskRestoreRecord, path) or DiskRestoreRecord()).container
