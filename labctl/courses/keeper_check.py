"""Whether the keeper answers as it would answer a student: over ssh, through the forced command."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from labctl.config import student_key
from labctl.courses.invitation import keeper_place
from labctl.courses.keys import Keys
from labctl.courses.publish import known_host_key
from labctl.courses.records.folder import CourseFolder
from labctl.courses.servers import Staff
from labctl.errors import HostKeyError, LabError, NotFoundError, PolicyError
from labctl.model import Check, Need
from labctl.providers import Surroundings
from labctl.providers.course import CourseProvider, CourseSettings
from labctl.servers.connections import Connections
from labctl.servers.host_keys import make_key

NAME = "keeper"


def check_keeper(staff: Staff, keys: Keys) -> list[Check]:
    """Ask the keeper what every student asks first, and what it would give for a seat.

    On the keeper's machine a throw-away key is let in for that long. Elsewhere this account's own
    student key is used, where the keeper knows it. Nothing where course.yaml names no keeper.
    """
    folder = staff.folder
    if folder.config.keeper is None:
        return []
    try:
        host_key = known_host_key(folder)
    except NotFoundError as error:
        return [_not_checked("nobody has been invited yet", error.hint)]
    here = keys.is_open()
    try:
        with _identity(staff, keys) if here else _own_key(staff) as identity:
            provider = _provider(staff, host_key, identity)
            try:
                return _answers(folder, provider)
            finally:
                provider.close()
    except HostKeyError as error:
        return [_failed(NAME, error)]
    except PolicyError as error:
        if here:
            return [_failed(NAME, error)]
        return [_not_checked("it knows no key of this account", _elsewhere(folder))]
    except LabError as error:
        return [_failed(NAME, error)]


def _answers(folder: CourseFolder, provider: CourseProvider) -> list[Check]:
    """PolicyError where it does not let the key in; what else fails is a Check."""
    place = keeper_place(folder)
    try:
        provider.hello()
    except PolicyError:
        raise
    except LabError as error:
        again = f"on the keeper's machine: labctl -C {folder.path} course serve"
        return [_failed(NAME, error, again)]
    found = [Check(name=NAME, ok=True, detail=f"{place} answers as it answers a student")]
    try:
        offers = provider.offers(Need())
    except LabError as error:
        again = "on the keeper's machine, as its account: labctl course check"
        return [*found, _failed("keeper's offers", error, again)]
    detail = f"it offers {offers[0].type}" if offers else "it has no offer for a seat"
    again = "" if offers else "raise server.max_price in course.yaml, or ask for less"
    return [*found, Check(name="keeper's offers", ok=bool(offers), detail=detail, next=again)]


def _provider(staff: Staff, host_key: str, identity: str) -> CourseProvider:
    config = staff.folder.config
    connections = Connections(staff.paths.ssh_dir, staff.paths.user_ssh_config)
    settings = CourseSettings(
        keeper=keeper_place(staff.folder),
        host_key=host_key,
        course=config.name,
        identity=identity,
    )
    around = Surroundings(
        data_dir=staff.paths.data_dir,
        owner=config.name,
        connect=connections.connect,
        settle_host_key=lambda endpoint: endpoint,
        progress=lambda text, done, total: None,
        talk=connections.talk,
    )
    return CourseProvider(settings, around)


@contextlib.contextmanager
def _identity(staff: Staff, keys: Keys) -> Iterator[str]:
    """A key that the keeper's account lets in for as long as this lasts."""
    with tempfile.TemporaryDirectory() as place:
        identity = Path(place) / "check"
        with keys.admit_check(make_key(identity)):
            yield str(identity)


@contextlib.contextmanager
def _own_key(staff: Staff) -> Iterator[str]:
    identity = student_key(staff.paths)
    if not identity.is_file():
        raise PolicyError("this account has no student's key")
    yield str(identity)


def _elsewhere(folder: CourseFolder) -> str:
    keeper = folder.config.keeper
    where = f" of {keeper.user}@{keeper.host}" if keeper else ""
    return f"on the keeper's machine, in the account{where}: labctl course check"


def _not_checked(why: str, next: str) -> Check:
    return Check(name=NAME, ok=True, skipped=True, detail=f"not checked: {why}", next=next)


def _failed(name: str, error: LabError, next: str = "") -> Check:
    said = ": ".join(filter(None, [error.what, error.why.replace("\n", "; ")]))
    return Check(name=name, ok=False, detail=said, next=next or error.hint)
