"""A lab machine on which the user has only a password, until labctl has set up their key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_directory import make_lab
from lab_servers import StartLabServer, inside
from sshd_container import Sshd

from labctl import Lab
from labctl.errors import AuthenticationError, LabError
from labctl.events import AskPassword, Question, SilentReporter
from labctl.model import Need
from labctl.servers.host_keys import ensure_key_pair
from labctl.servers.key_setup import call_with_key_setup
from labctl.shell import Secret
from labctl.transports.password_login import authorize_key, list_login_methods

pytest_plugins = ["sshd_fixtures"]
pytestmark = pytest.mark.engine

PASSWORD = "correct horse"
WITH_PAM = ("PasswordAuthentication=no", "KbdInteractiveAuthentication=yes", "UsePAM=yes")


class Typist(SilentReporter):
    """A user at a terminal, who types these passwords and says yes."""

    def __init__(self, *passwords: str) -> None:
        self.passwords = list(passwords)
        self.asked: list[Question] = []

    def confirm(self, decision: Question) -> bool:
        self.asked.append(decision)
        return True

    def find_password_prompt(self) -> AskPassword | None:
        return lambda prompt: Secret(self.passwords.pop(0))


@pytest.fixture(scope="module")
def box(sshd: Sshd) -> Sshd:
    for user in ("student", "fishy", "cshy"):
        sshd.sh(f"echo '{user}:{PASSWORD}' | chpasswd; rm -rf /home/{user}/.ssh")
    return sshd


@pytest.fixture
def restarted(box: Sshd) -> Iterator[Sshd]:
    """The machine, on which a test may restart sshd with other options."""
    yield box
    box.stop_sshd()
    box.start_sshd()


def open_lab(home: Path, box: Sshd, monkeypatch: pytest.MonkeyPatch, user: Typist) -> Lab:
    monkeypatch.setenv("HOME", str(home))
    key = home / ".ssh" / "lab key"
    ensure_key_pair(key)
    (home / "digits").mkdir()
    host = f"{{host: 127.0.0.1, port: {box.port}, user: student, identity: '{key}'}}"
    (home / "digits" / "lab.yaml").write_text(
        f"lab: digits\nserver: {{provider: static, static: {{hosts: [{host}]}}}}\n"
    )
    return Lab.load(home / "digits", reporter=user, in_process=False)


@pytest.mark.long
def test_a_password_once_and_then_the_key(
    box: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = Typist("a typo", PASSWORD)
    context = open_lab(tmp_path, box, monkeypatch, user).context
    offers = call_with_key_setup(context, lambda: context.provider.offers(Need()))
    assert [offer.provider for offer in offers] == ["static"]
    assert user.passwords == []
    assert len(user.asked) == 2, "the host key, then the key"
    assert "authorized_keys" in user.asked[1].detail
    keys = box.sh("cat /home/student/.ssh/authorized_keys").splitlines()
    assert keys == [(tmp_path / ".ssh" / "lab key.pub").read_text().strip()]
    modes = box.sh("cd /home/student && stat -c '%a %U' .ssh .ssh/authorized_keys")
    assert modes == "700 student\n600 student\n"
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(PASSWORD.encode() in path.read_bytes() for path in written)


@pytest.mark.parametrize("user", ["fishy", "cshy"])
def test_a_key_is_added_once_below_the_others(box: Sshd, user: str) -> None:
    """In the login shells of these users too; the last line of the file has no newline."""
    folder = f"/home/{user}/.ssh"
    box.sh(
        f"mkdir -m 775 {folder}; cd {folder}; printf '#ssh-ed25519 AAAAnew old\\nssh-rsa AAAA1 a'"
        f" > authorized_keys; chmod 664 authorized_keys; chown -R {user} ."
    )
    for comment in ("me@laptop", "me again"):
        key = f"ssh-ed25519 AAAAnew {comment}"
        authorize_key(box.endpoint(user), Secret(PASSWORD), key)
    text = box.sh(f"cat {folder}/authorized_keys")
    assert text == "#ssh-ed25519 AAAAnew old\nssh-rsa AAAA1 a\nssh-ed25519 AAAAnew me@laptop\n"
    assert box.sh(f"stat -c %a {folder} {folder}/authorized_keys") == "755\n644\n"


@pytest.mark.long
def test_sshd_may_ask_for_the_password_as_a_question(restarted: Sshd) -> None:
    restarted.stop_sshd()
    restarted.start_sshd(*WITH_PAM)
    endpoint = restarted.endpoint()
    assert list_login_methods(endpoint) == {"publickey", "keyboard-interactive"}
    with pytest.raises(AuthenticationError, match="does not accept the password"):
        authorize_key(endpoint, Secret("wrong"), "ssh-ed25519 AAAAasked me")
    authorize_key(endpoint, Secret(PASSWORD), "ssh-ed25519 AAAAasked me")
    assert "AAAAasked me\n" in restarted.sh("cat /home/student/.ssh/authorized_keys")
    restarted.sh("chage -d 0 student")
    with pytest.raises(LabError, match="asks for more than a password"):
        authorize_key(endpoint, Secret(PASSWORD), "ssh-ed25519 AAAAexpired me")
    restarted.sh("chage -d -1 student")


def test_up_in_a_terminal_sets_up_the_key_and_makes_the_machine_ready(
    start_lab_server: StartLabServer, tmp_path: Path, base_image: str
) -> None:
    machine = start_lab_server("lectures")
    code, text = inside(
        machine.server.id,
        f"echo 'student:{PASSWORD}' | chpasswd && rm /home/student/.ssh/authorized_keys &&"
        " sed -i 's/^PasswordAuthentication no/PasswordAuthentication yes/' /etc/ssh/sshd_config &&"
        " pkill -o -HUP -x sshd",
        user="root",
    )
    assert code == 0, text
    lab = make_lab(tmp_path, "lectures", base_image)
    key = tmp_path / "home" / ".ssh" / "id_ed25519"
    ensure_key_pair(key)
    port = machine.endpoint.port
    host = f"{{host: 127.0.0.1, port: {port}, user: student, identity: {key}}}"
    (lab.root / "lab.yaml").write_text(
        f"lab: lectures\nserver: {{provider: static, static: {{hosts: [{host}]}}}}\n"
    )
    answers = {
        "approve this lab.yaml?": "y",
        "Is this its host key?": "y",
        "now? [Y/n]": "y",
        "'s password: ": PASSWORD,
    }
    with lab.in_terminal("up") as terminal:
        for question, answer in answers.items():
            terminal.said(question, 60)
            terminal.type(f"{answer}\n")
        assert terminal.popen.wait(120) == 0, terminal.shown.decode()
    assert PASSWORD.encode() not in terminal.shown
    assert lab.json("status", "--refresh")["server"]["state"] == "running"
    lab.labctl("down", "--yes", "--discard")
