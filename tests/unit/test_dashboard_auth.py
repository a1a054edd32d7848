"""Who gets into the dashboard: tokens, cookies, hosts, origins, forms, and paths that lead away."""

from __future__ import annotations

import base64
import json
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboard_bed import Bed, Visitor, fill, make, wait_until
from itsdangerous import TimestampSigner

from labctl.errors import BusyError, LabError
from labctl.web.auth import SESSION_S, read_or_create_key
from labctl.web.factory import KEY_FILE
from labctl.web.http_server import URL_FILE, serve_dashboard
from labctl.web.live_updates import Feed
from labctl.web.request_state import sanitize_path


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    made = fill(make(tmp_path_factory.mktemp("dashboard")))
    yield made
    made.state.close()


@pytest.fixture(scope="module")
def served(bed: Bed) -> Iterator[str]:
    """Where it is served: the URL without its token."""
    stop = threading.Event()
    url = bed.start(stop)
    yield url.partition("/?")[0]
    stop.set()


def next_url(bed: Bed) -> str:
    return (bed.folder.private / "keeper" / URL_FILE).read_text().strip()


@pytest.fixture
def visitor(bed: Bed, served: str) -> Visitor:
    """A browser that was let in."""
    made = Visitor(next_url(bed))
    made.enter()
    return made


def test_the_token_lets_one_browser_in_and_no_second(bed: Bed, served: str) -> None:
    first = Visitor(next_url(bed))
    headers = first.enter()
    cookie = headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "path=/" in cookie
    assert first.ask("/")[0] == 200
    again = Visitor(first.url)
    assert again.ask(f"/{again.query}")[0] == 403
    assert next_url(bed) != first.url
    file = bed.folder.private / "keeper" / URL_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "path",
    ["/", "/costs", "/events/board", "/seats/00000000", "/static/x/dashboard.css", "/?token="],
)
def test_without_a_cookie_nothing_is_told(bed: Bed, served: str, path: str) -> None:
    status, headers, body = Visitor(f"{served}/").ask(path)
    assert status == 403
    assert "Lovelace" not in body
    assert f"keeper/{URL_FILE}" in body  # where to go on, also after the keeper began anew
    assert "default-src 'none'" in headers["content-security-policy"]


def test_a_guessed_token_or_cookie_opens_nothing(served: str, visitor: Visitor) -> None:
    stranger = Visitor(f"{served}/?token={'A' * 43}")
    assert stranger.ask(f"/{stranger.query}")[0] == 403
    name = visitor.cookie.partition("=")[0]
    assert visitor.ask("/", Cookie=f"{name}={'A' * 43}")[0] == 403
    assert visitor.ask("/", Cookie=f"{name}=")[0] == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_foreign_host_is_not_answered(visitor: Visitor, host: str) -> None:
    """A name of a stranger's that points at the loopback (DNS rebinding)."""
    status, headers, body = visitor.ask("/", Host=host)
    assert status == 400
    assert "Lovelace" not in body
    if host:  # without one, the server itself answers
        assert "default-src 'none'" in headers["content-security-policy"]


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1:9000", "localhost", "[::1]:80"])
def test_a_forwarded_port_is_a_way_here_too(visitor: Visitor, host: str) -> None:
    assert visitor.ask("/", Host=host)[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_another_page_gets_nothing(visitor: Visitor, headers: dict[str, str]) -> None:
    """Also one at another port of this machine, such as a student's forwarded notebook."""
    for path in ("/", "/events/board"):
        status, _, body = visitor.ask(path, **headers)
        assert status == 403
        assert "Lovelace" not in body


def test_a_form_must_be_our_own(bed: Bed, visitor: Visitor) -> None:
    key = bed.seat(0).pseudonym
    before = bed.folder.ledger.list_entries()
    path, form = f"/seats/{key}/extend", "application/x-www-form-urlencoded"
    own = f"http://{visitor.host}"
    refused = [
        visitor.form(path, by="2h"),
        visitor.form(path, by="2h", csrf="x" * 32),
        visitor.ask(path, "POST", "by=2h", Content_Type=form),
        visitor.ask(path, "POST", "by=2h", Content_Type=form, Origin="http://evil.example"),
    ]
    assert [status for status, _, _ in refused] == [403] * 4
    assert visitor.ask(path, "POST", "{}", Origin=own, Content_Type="application/json")[0] == 415
    big = visitor.ask(path, "POST", "a=" + "b" * 300_000, Origin=own, Content_Type=form)
    assert big[0] == 413
    assert visitor.ask(path, "PUT", "by=2h", Origin=own, Content_Type=form)[0] == 405
    assert bed.folder.ledger.list_entries() == before


def test_a_session_of_one_browser_is_not_anothers(bed: Bed, visitor: Visitor) -> None:
    other = Visitor(next_url(bed))
    other.enter()
    _, _, page = other.ask("/")
    word = page.partition('name="csrf" value="')[2].partition('"')[0]
    assert visitor.form("/names", csrf=word, hidden="yes", back="/")[0] == 403
    assert other.form("/names", csrf=word, hidden="yes", back="/costs")[0] == 303
    assert "Lovelace" in visitor.ask("/")[2]
    assert "Lovelace" not in other.ask("/")[2]


@pytest.mark.parametrize(
    "path",
    [
        "/seats/../../../../etc/passwd",
        "/seats/..%2f..%2f..%2fetc%2fpasswd",
        "/seats/lovelace",
        "/assignments/..%2f..%2froster.csv",
        "/assignments/hw9",
        "/static/../base.html.j2",
        "/static/..%2f..%2f..%2froster.csv",
        "/static//etc/passwd",
        "/events/seats/..%2f..%2fetc",
        "/events/assignments/%2e%2e",
        "/seats/KEY/runs/..%2f..%2fx/cancel",
        "/seats/KEY/handed/KEY/..%2f..%2f.course/1/bundle",
        "/seats/KEY/handed/KEY/hw3/..%2f1/bundle",
        "/seats/KEY/handed/KEY/hw3/99/report",
        "/seats/KEY/handed/00000000/hw3/1/report",
        "/docs",
        "/openapi.json",
    ],
)
def test_a_path_that_leads_away_leads_nowhere(bed: Bed, visitor: Visitor, path: str) -> None:
    status, headers, body = visitor.ask(path.replace("KEY", bed.seat(0).pseudonym))
    assert status == 404
    for leaked in ("root:", "@example.edu", "secret", "{%"):
        assert leaked not in body
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("by", ["", "-1h", "2 h; rm -rf /", "99d", "nonsense", "0s"])
def test_no_odd_span_is_asked_of_a_server(bed: Bed, visitor: Visitor, by: str) -> None:
    path = f"/seats/{bed.seat(0).pseudonym}/extend"
    before = bed.folder.ledger.list_entries()
    assert visitor.post(path, by=by)[0] == 400
    assert bed.folder.ledger.list_entries() == before


def test_every_answer_forbids_strangers_scripts(visitor: Visitor) -> None:
    for path in ("/", "/costs", "/nowhere", "/seats/zz"):
        _, headers, _ = visitor.ask(path)
        policy = headers["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "same-origin"
        assert headers["cache-control"] == "no-store"


def sign_cookie(key: str, **data: object) -> str:
    """A session's cookie value, as Starlette signs it."""
    return TimestampSigner(key).sign(base64.b64encode(json.dumps(data).encode())).decode()


def test_a_session_lasts_twelve_hours_whatever_is_done_in_it(bed: Bed, visitor: Visitor) -> None:
    """Changing a session signs its cookie anew; that does not prolong it."""
    name = visitor.cookie.partition("=")[0]
    key = (bed.folder.private / "keeper" / KEY_FILE).read_text().strip()
    now = int(time.time())
    answers = [
        visitor.ask("/costs", Cookie=f"{name}={cookie}")[0]
        for cookie in (
            sign_cookie(key, id="a" * 22, signed_in_at=now - SESSION_S + 600),
            sign_cookie(key, id="a" * 22, signed_in_at=now - SESSION_S - 1),
            sign_cookie(key, id="a" * 22),
            sign_cookie(key[::-1], id="a" * 22, signed_in_at=now),
        )
    ]
    assert answers == [200, 403, 403, 403]


def test_a_cookie_tells_neither_names_nor_a_forms_token(bed: Bed, visitor: Visitor) -> None:
    """A student's service on a forwarded port of this host is sent it too."""
    value = visitor.cookie.partition("=")[2].strip('"').partition(".")[0]
    held = json.loads(base64.b64decode(value))
    assert held.keys() == {"id", "signed_in_at"}
    assert visitor.form("/names", csrf=held["id"], hidden="yes", back="/")[0] == 403


def test_a_session_outlives_a_restart_of_the_keeper(tmp_path: Path) -> None:
    bed = fill(make(tmp_path))
    key_file = bed.folder.private / "keeper" / KEY_FILE
    stop = threading.Event()
    before = Visitor(bed.start(stop))
    before.enter()
    page = before.ask("/")[2]
    stop.set()
    wait_until(lambda: not (bed.folder.private / "keeper" / URL_FILE).exists())
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    stop = threading.Event()
    after = Visitor(bed.start(stop))
    after.cookie = before.cookie
    assert after.ask("/")[0] == 200
    # A form that stood open goes on too.
    token = page.partition('name="csrf" value="')[2].partition('"')[0]
    assert after.form("/names", csrf=token, hidden="yes", back="/")[0] == 303
    assert after.ask(f"/{before.query}")[0] == 403
    stop.set()
    wait_until(lambda: not (bed.folder.private / "keeper" / URL_FILE).exists())
    # Without its key a course knows nobody any more.
    key_file.unlink()
    stop = threading.Event()
    last = Visitor(bed.start(stop))
    last.cookie = before.cookie
    assert last.ask("/")[0] == 403
    stop.set()
    bed.state.close()


def test_a_key_that_others_could_read_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "keeper" / KEY_FILE
    first = read_or_create_key(file)
    assert read_or_create_key(file) == first
    file.chmod(0o640)
    second = read_or_create_key(file)
    assert second != first
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for damaged in (b"", b"short\n", b"\xff\xfe"):
        file.write_bytes(damaged)
        assert len(read_or_create_key(file)) >= 43


@pytest.mark.parametrize("path", ["//evil.example", "http://evil.example", "/\\evil", "", "/a\nb"])
def test_a_form_leads_back_here_only(path: str) -> None:
    assert sanitize_path(path) == "/"


def test_a_port_that_is_taken_is_told(bed: Bed, served: str) -> None:
    port = int(served.rpartition(":")[2])
    with pytest.raises(BusyError, match="port"):
        serve_dashboard(bed.folder, bed.paths, bed.state, port=port, stop=threading.Event())


def test_a_dashboard_that_cannot_start_says_why_at_once(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ValueError("no such template")

    monkeypatch.setattr(Feed, "open_channel", fail)
    began_s = time.monotonic()
    with pytest.raises(LabError, match="did not start") as caught:
        bed.start(threading.Event())
    assert "no such template" in caught.value.why
    assert time.monotonic() - began_s < 30
