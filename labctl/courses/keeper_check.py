"""A check that the keeper answers students: over ssh, through the forced command."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from labctl.config import student_key
from labctl.courses.invitation import keeper_address
from labctl.courses.keys import AuthorizedKeys
from labctl.courses.publish import read_host_key
from labctl.courses.records.folder import CourseFolder
from labctl.courses.servers import CourseOperator
from labctl.errors import (
    BusyError,
    ConnectError,
    HostKeyError,
    LabError,
    NotFoundError,
    PolicyError,
)
from labctl.errors.replies import describe_error
from labctl.errors.subject import COURSE
from labctl.model import Check, Need
from labctl.providers import ProviderContext
from labctl.providers.course import CourseProvider, CourseProviderSettings
from labctl.servers.connections import Connections
from labctl.servers.host_keys import ensure_key_pair

NAME = "keeper"


def check_keeper(staff: CourseOperator, keys: AuthorizedKeys) -> list[Check]:
    """Send the keeper a student's first request, and ask for its offers to a seat.

    On the keeper's machine a temporary key is authorized for the check. Elsewhere it uses this
    account's own student key, if the keeper knows it. Empty if course.yaml names no keeper.
    """
    folder = staff.folder
    if folder.config.keeper is None:
        return []
    try:
        host_key = read_host_key(folder)
    except NotFoundError as error:
        return [_skipped_check("nobody has been invited yet", error.hint)]
    on_keeper = keys.is_open()
    try:
        with _temporary_key(staff, keys) if on_keeper else _own_key(staff) as identity:
            provider = _build_provider(staff, host_key, identity)
            try:
                return _check_answers(folder, provider)
            finally:
                provider.close()
    except HostKeyError as error:
        return [_failed_check(NAME, error)]
    except PolicyError as error:
        if on_keeper:
            return [_failed_check(NAME, error)]
        return [_skipped_check("it does not know this account's key", _keeper_hint(folder))]
    except LabError as error:
        return [_failed_check(NAME, error)]


def _check_answers(folder: CourseFolder, provider: CourseProvider) -> list[Check]:
    """Run the checks. PolicyError if the keeper rejects the key; other failures become Checks."""
    place = keeper_address(folder)
    try:
        provider.fetch_greeting()
    except PolicyError:
        raise
    except LabError as error:
        next_step = f"on the keeper's machine:\nlabctl -C {folder.path} course serve"
        # The keeper's own reason and hint are for students.
        if isinstance(error, BusyError) and not isinstance(error, ConnectError):
            return [Check(name=NAME, ok=False, detail=error.what, next=next_step)]
        return [_failed_check(NAME, error, next_step)]
    checks = [Check(name=NAME, ok=True, detail=f"{place} answers students")]
    try:
        offers = provider.offers(Need())
    except LabError as error:
        next_step = "on the keeper's machine, as its account:\nlabctl course check"
        return [*checks, _failed_check("keeper's offers", error, next_step)]
    detail = f"it offers {offers[0].type}" if offers else "it has no server to offer"
    next_step = "" if offers else "raise server.max_price in course.yaml, or lower its requirements"
    return [*checks, Check(name="keeper's offers", ok=bool(offers), detail=detail, next=next_step)]


def _build_provider(staff: CourseOperator, host_key: str, identity: str) -> CourseProvider:
    config = staff.folder.config
    connections = Connections(staff.paths.ssh_dir, staff.paths.user_ssh_config)
    settings = CourseProviderSettings(
        keeper=keeper_address(staff.folder),
        host_key=host_key,
        course=config.name,
        identity=identity,
    )
    context = ProviderContext(
        data_dir=staff.paths.data_dir,
        owner=config.name,
        connect=connections.connect,
        settle_host_key=lambda endpoint: endpoint,
        progress=lambda text, done, total: None,
        talk=connections.open_line_channel,
    )
    return CourseProvider(settings, context)


@contextlib.contextmanager
def _temporary_key(staff: CourseOperator, keys: AuthorizedKeys) -> Iterator[str]:
    """Yield a key that the keeper's account authorizes while the block runs."""
    with tempfile.TemporaryDirectory() as place:
        identity = Path(place) / "check"
        with keys.admit_check(ensure_key_pair(identity)):
            yield str(identity)


@contextlib.contextmanager
def _own_key(staff: CourseOperator) -> Iterator[str]:
    identity = student_key(staff.paths)
    if not identity.is_file():
        raise PolicyError("this account has no student key")
    yield str(identity)


def _keeper_hint(folder: CourseFolder) -> str:
    keeper = folder.config.keeper
    where = f" of {keeper.user}@{keeper.host}" if keeper else ""
    return f"on the keeper's machine, in the account{where}:\nlabctl course check"


def _skipped_check(why: str, next: str) -> Check:
    return Check(name=NAME, ok=True, skipped=True, detail=f"not checked: {why}", next=next)


def _failed_check(name: str, error: LabError, next: str = "") -> Check:
    error.subject = COURSE
    message = describe_error(error)
    return Check(name=name, ok=False, detail=message, next=next or error.hint)
