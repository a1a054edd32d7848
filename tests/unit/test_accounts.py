"""Two AWS accounts, one lab: with the other profile nothing is called gone, and nothing is made."""

from __future__ import annotations

import io
import sqlite3
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from aws_cloud import REGION, Cloud
from aws_provider import with_market
from moto.backends import get_backend

from labctl import Lab
from labctl.cli.exit_codes import run_and_exit
from labctl.cli.groups import cli
from labctl.errors import PolicyError
from labctl.events import Question, SilentReporter
from labctl.model import CreateServerRequest, Resource, Server
from labctl.servers import accounts, attempts
from labctl.servers.adoption import adopt

WORK, OTHER = "123456789012", "222222222222"
SWITCH = "LABCTL_SERVER_AWS_PROFILE=work labctl down"


class Agreeable(SilentReporter):
    """Says yes to every price."""

    def confirm(self, decision: Question) -> bool:
        return True


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


@dataclass
class TwoAccounts:
    """A lab, and the profiles `work` and `other` in ~/.aws of its home."""

    home: Path
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def use(self, profile: str) -> None:
        self.monkeypatch.setenv("AWS_PROFILE", profile)

    def lab(self, profile: str) -> Lab:
        """As a new process with this profile opens it."""
        self.use(profile)
        return Lab.load(self.home / "lab" / "lab.yaml", reporter=Agreeable())

    def server(self) -> Server:
        """A server of the profile `work`, made by the very calls of `labctl up`."""
        lab = self.lab("work")
        return attempts.create_server(lab.context, lab.config.server.need)

    def labctl(self, *words: str) -> Answer:
        self.monkeypatch.setattr(sys, "argv", ["labctl", *words])
        self.monkeypatch.setattr(sys, "stdin", io.StringIO())
        self.capsys.readouterr()
        code = run_and_exit(cli)
        said = self.capsys.readouterr()
        return Answer(code, said.out, said.err)

    def recorded(self) -> list[Server]:
        return self.lab("work").context.state.list_servers()

    def instances(self) -> list[str]:
        found = get_backend("ec2")[WORK][REGION].all_instances()
        return [one.state for one in found]


def _keys_of(account: str) -> tuple[str, str]:
    iam = get_backend("iam")[account]["aws"]
    iam.create_user(REGION, user_name="ada")
    key = iam.create_access_key("ada")
    return key.access_key_id, key.secret_access_key


def _loopback() -> str:
    return "127.0.0.1"


@pytest.fixture
def two(
    cloud: Cloud,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> TwoAccounts:
    with_market(cloud)
    # An address that refuses at once, not a stranger's, where every ssh runs out of time.
    monkeypatch.setattr("moto.ec2.models.elastic_network_interfaces.random_public_ip", _loopback)
    get_backend("iam").reset()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "LABCTL_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".aws").mkdir()
    text = ""
    for profile, account in (("work", WORK), ("other", OTHER)):
        key, secret = _keys_of(account)
        text += f"[{profile}]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
    (tmp_path / ".aws" / "credentials").write_text(text)
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "lab.yaml").write_text(
        "lab: digits\nrun: [python, train.py]\nserver:\n  provider: aws\n  gpu: any\n  ttl: 1h\n"
        f"  spot: never\n  aws: {{regions: [{REGION}], ssh_from: [192.0.2.0/24], settle: 1s}}\n"
    )
    monkeypatch.chdir(tmp_path / "lab")
    return TwoAccounts(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    "words", [("status", "--refresh"), ("up", "--yes"), ("down", "--yes"), ("down", "--discard")]
)
def test_another_profile_is_refused_and_nothing_is_forgotten(
    two: TwoAccounts, words: tuple[str, ...]
) -> None:
    server = two.server()
    assert server.account == WORK
    two.use("other")
    answer = two.labctl(*words)
    assert answer.code == 3
    for part in (server.id, f"account {WORK} (profile work)", f"account {OTHER} (profile other)"):
        assert part in answer.err
    assert SWITCH in answer.err
    assert [one.id for one in two.recorded()] == [server.id]
    assert two.instances() == ["running"]
    assert get_backend("ec2")[OTHER][REGION].all_instances() == []


def test_the_command_that_the_refusal_names_ends_the_server(
    two: TwoAccounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.server()
    two.use("other")
    monkeypatch.setenv("LABCTL_SERVER_AWS_PROFILE", "work")
    answer = two.labctl("down", "--yes")
    assert (answer.code, two.instances()) == (0, ["terminated"])
    assert two.recorded() == []


def test_orphans_names_what_another_account_has(two: TwoAccounts) -> None:
    server = two.server()
    two.use("other")
    answer = two.labctl("orphans")
    assert answer.code == 1
    assert server.id in answer.err
    assert "LABCTL_SERVER_AWS_PROFILE=work labctl orphans" in answer.err


@pytest.mark.parametrize(("word", "code"), [("up", 3), ("down", 3), ("orphans", 1)])
def test_an_interrupted_up_waits_for_its_own_account(
    two: TwoAccounts, word: str, code: int
) -> None:
    lab = two.lab("work")
    request = CreateServerRequest(
        lab="digits",
        lab_id=lab.context.lab_id,
        token="0123456789abcdef",
        public_key="ssh-ed25519 AAAA",
        identity="",
        need=lab.config.server.need,
    )
    [offer, *_] = lab.context.provider.offers(lab.config.server.need)
    lab.context.state.begin_attempt(request.token, request, offer, WORK)
    two.use("other")
    answer = two.labctl(word, "--yes")
    assert answer.code == code
    assert f"account {WORK}" in answer.err
    assert [one.account for one in lab.context.state.list_open_attempts()] == [WORK]


def test_a_server_that_ended_is_gone_in_its_own_account(two: TwoAccounts) -> None:
    server = two.server()
    two.lab("work").context.provider.terminate(server.id)
    assert adopt(two.lab("work").context) is None
    assert two.recorded() == []


def test_an_absent_server_is_gone_only_after_the_settling_time(two: TwoAccounts) -> None:
    server = two.server()
    context = two.lab("work").context
    young = msgspec.structs.replace(server, id=f"i-0123456789abcdef0.{REGION}")
    young = msgspec.structs.replace(young, created_at=time.time() + 60.0)
    assert not accounts.is_gone(context, young)
    assert accounts.is_gone(context, msgspec.structs.replace(young, state="ending"))
    assert accounts.is_gone(context, msgspec.structs.replace(young, created_at=1.0))
    with pytest.raises(PolicyError):
        accounts.is_gone(two.lab("other").context, msgspec.structs.replace(young, created_at=1.0))


@pytest.fixture
def old_record(two: TwoAccounts) -> Server:
    """As an earlier labctl wrote it: without its account."""
    server = msgspec.structs.replace(two.server(), account="", created_at=1.0)
    two.lab("work").context.state.save_server(server)
    return server


def test_an_old_record_stays_where_it_is_not_shown(two: TwoAccounts, old_record: Server) -> None:
    two.use("other")
    for words in (("status", "--refresh"), ("up", "--yes"), ("down", "--yes")):
        answer = two.labctl(*words)
        assert answer.code == 3
        assert "labctl down --forget" in answer.err
    assert two.recorded() == [old_record]


def test_an_old_record_gets_its_account_at_the_first_look(
    two: TwoAccounts, old_record: Server
) -> None:
    adopted = adopt(two.lab("work").context)
    assert adopted is not None
    assert [one.account for one in two.recorded()] == [WORK]


def test_an_old_record_goes_once_its_end_is_shown(two: TwoAccounts, old_record: Server) -> None:
    two.lab("work").context.provider.terminate(old_record.id)
    assert adopt(two.lab("work").context) is None
    assert two.recorded() == []


def test_forgetting_asks_and_then_lets_the_lab_go_on(two: TwoAccounts) -> None:
    server = two.server()
    two.use("other")
    assert two.labctl("down", "--forget").code == 3
    assert [one.id for one in two.recorded()] == [server.id]
    two.use("other")
    answer = two.labctl("down", "--forget", "--yes")
    assert (answer.code, two.recorded()) == (0, [])
    assert server.id in answer.out
    two.use("other")
    assert two.labctl("down", "--forget", "--yes").code == 4
    assert two.labctl("down", "--yes").code == 0
    assert two.instances() == ["running"]


def test_a_kept_disk_of_another_account_stays_on_record(two: TwoAccounts) -> None:
    from labctl.servers.disks import record_shown
    from labctl.state.disks import list_kept_disks

    server = two.server()
    context = two.lab("work").context
    [disk] = context.provider.keep_disk(server.id, time.time() + 86_400.0)  # type: ignore[attr-defined]
    assert disk.account == WORK
    context.provider.terminate(server.id)
    shown = [one for one in context.provider.leftovers() if one.expires_at]
    assert [one.account for one in shown] == [WORK]
    record_shown(context, shown, None)
    everywhere = Lab.load(two.home / "lab" / "lab.yaml", everywhere=True)
    for profile, left in (("other", 1), ("work", 0)):
        two.use(profile)
        everywhere = Lab.load(two.home / "lab" / "lab.yaml", everywhere=True)
        none: list[Resource] = []
        record_shown(everywhere.context, none, None)
        assert len(list_kept_disks(context.state)) == left


def test_the_account_is_asked_once_for_each_set_of_credentials(
    two: TwoAccounts, cloud: Cloud
) -> None:
    asked: Callable[[], int] = lambda: cloud.seen["GetCallerIdentity"]  # noqa: E731
    for profile, account in (("work", WORK), ("work", WORK), ("other", OTHER)):
        assert two.lab(profile).context.provider.get_account().id == account
    assert asked() == 2


def test_a_server_that_aws_shows_ends_though_nobody_says_whose_the_credentials_are(
    two: TwoAccounts, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = two.server()
    monkeypatch.setattr("labctl.providers.aws.clients._ACCOUNT_IDS", {})
    cloud.never("GetCallerIdentity", "RequestTimeout")
    two.use("other")
    assert two.labctl("down", "--discard", "--yes").code == 75
    assert [one.id for one in two.recorded()] == [server.id]
    two.use("work")
    answer = two.labctl("down", "--discard", "--yes")
    assert (answer.code, two.instances()) == (0, ["terminated"])
    assert two.recorded() == []


def use_another_region(two: TwoAccounts) -> None:
    """lab.yaml's `regions` as somebody changes it while things are in the first one."""
    path = two.home / "lab" / "lab.yaml"
    path.write_text(path.read_text().replace(f"regions: [{REGION}]", "regions: [us-west-2]"))


@pytest.mark.parametrize("age_s", [0.0, 3600.0])
def test_an_interrupted_up_is_looked_for_in_its_own_region(two: TwoAccounts, age_s: float) -> None:
    """Killed between AWS's answer and the record of it; the region is changed; then `down`."""
    lab = two.lab("work")
    state, server = lab.context.state, two.server()
    [made] = state.list_events(lab_id=lab.context.lab_id, kind="attempt", limit=1)
    state.drop_server(server.id)
    connection = sqlite3.connect(lab.context.paths.database)
    with connection:
        connection.execute(
            "UPDATE attempts SET outcome = '', created_at = ? WHERE token = ?",
            (time.time() - age_s, made.detail["token"]),
        )
    connection.close()
    assert [one.offer.region for one in state.list_open_attempts()] == [REGION]
    use_another_region(two)
    answer = two.labctl("down", "--discard", "--yes")
    assert (answer.code, two.instances()) == (0, ["terminated"])
    assert server.id in answer.out


def test_an_expired_disk_goes_though_its_region_is_not_asked_any_more(two: TwoAccounts) -> None:
    from labctl.servers.disks import record_shown
    from labctl.state.disks import list_kept_disks

    server = two.server()
    context = two.lab("work").context
    context.provider.keep_disk(server.id, time.time() - 60.0)  # type: ignore[attr-defined]
    context.provider.terminate(server.id)
    record_shown(context, context.provider.leftovers(), None)
    assert len(list_kept_disks(context.state)) == 1
    use_another_region(two)
    assert "removed the kept disk" in two.labctl("status", "--refresh").err
    assert list_kept_disks(context.state) == []
