"""labctl's server for models over HTTP: what it answers, what it refuses, what it counts."""

from __future__ import annotations

import base64
import json
import math
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from PIL import Image
from serving_bed import Brightness, Client, bomb, model, picture, serving

from labctl.services.model_server.project import Model
from labctl.services.model_server.settings import ServeSettings


def text(content: bytes) -> str:
    return base64.b64encode(content).decode()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_an_image_is_classified_in_each_way_it_can_be_sent(kind: str) -> None:
    content = picture(255, kind=kind)
    with serving() as client:
        replies = [
            client.post(content),
            client.post(content, "application/octet-stream"),
            client.form(content),
            client.json({"image": text(content)}),
            client.json({"images": [f"data:image/png;base64,{text(content)}"]}),
        ]
    for reply in replies:
        assert reply.status == 200, reply.text
        body = reply.json()
        assert body["model"] == {"run": "first", "checkpoint": "step-00000001"}
        (told,) = body["predictions"]
        assert told["class"] == "light"
        assert told["probability"] == pytest.approx(1, abs=0.02)
        assert [one["class"] for one in told["top"]] == ["light", "dark"]


def test_several_images_of_a_request_are_answered_in_their_order() -> None:
    files = [picture(value) for value in (0, 255, 0)]
    with serving() as client:
        form = client.form(*files)
        told = client.json({"images": [text(one) for one in files]})
    for reply in (form, told):
        classes = [one["class"] for one in reply.json()["predictions"]]
        assert classes == ["dark", "light", "dark"]


# Functions, since each worker that collects the tests would make the bombs.
BAD_IMAGES: dict[str, tuple[Callable[[], bytes], int, str]] = {
    "nothing": (lambda: b"", 400, "no_image"),
    "a text": (lambda: b"hello", 422, "not_an_image"),
    "a page": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", 422, "not_an_image"),
    "a program": (lambda: b"\x7fELF" + bytes(100), 422, "not_an_image"),
    "a pickle": (lambda: b"\x80\x04cos\nsystem\n", 422, "not_an_image"),
    "cut off": (lambda: picture(size=(64, 64), kind="JPEG")[:300], 422, "not_an_image"),
    "half a PNG": (lambda: bomb(100, 100, rows=100)[:60], 422, "not_an_image"),
    "a broken header": (lambda: picture()[:20], 422, "not_an_image"),
    "wide": (lambda: bomb(2**31 - 1, 1), 413, "too_large"),
    "a claim of 10 gigapixels": (lambda: bomb(100_000, 100_000), 413, "too_large"),
    "a bomb of 100 megapixels": (lambda: bomb(10_000, 10_000, rows=10_000), 413, "too_large"),
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Client]:
    """A server that must bear whatever it is sent."""
    with serving() as client:
        yield client


@pytest.mark.parametrize("what", BAD_IMAGES)
def test_what_is_no_image_or_too_large_is_refused_and_the_server_goes_on(
    shared: Client, what: str
) -> None:
    make_content, status, reason = BAD_IMAGES[what]
    counted = f'labctl_errors_total{{reason="{reason}"}}'
    before = shared.metric(counted) or 0
    reply = shared.post(make_content())
    assert (reply.status, reply.reason) == (status, reason)
    assert reply.json()["error"]["message"]
    assert shared.metric(counted) == before + 1
    assert shared.post(picture()).status == 200


def test_the_message_says_which_of_several_images_is_bad() -> None:
    with serving() as client:
        reply = client.json({"images": [text(picture()), text(b"hello")]})
        assert reply.json()["error"]["image"] == 1
        reply = client.json({"images": [text(picture()), text(picture()), "*"]})
        assert (reply.status, reply.reason) == (400, "bad_base64")
        assert reply.json()["error"]["image"] == 2


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ("{", 400, "bad_json"),
        ("[]", 400, "bad_json"),
        ('{"image": 3}', 400, "bad_json"),
        ('{"images": "no"}', 400, "bad_json"),
        ('{"images": []}', 400, "no_image"),
        ("[" * 100_000, 400, "bad_json"),
        ('"\\ud800"', 400, "bad_json"),
        (json.dumps({"images": ["AA=="] * 33}), 413, "too_many"),
    ],
)
def test_json_that_is_no_request_is_refused(
    shared: Client, body: str, status: int, reason: str
) -> None:
    reply = shared.post(body.encode(), "application/json")
    assert (reply.status, reply.reason) == (status, reason)


def test_a_body_is_bounded_whether_its_length_is_told_or_not() -> None:
    with serving(settings=ServeSettings(max_body_bytes=1000)) as client:
        for content in (bytes(1001), iter([bytes(600), bytes(600)])):
            reply = client.post(content)
            assert (reply.status, reply.reason) == (413, "too_large")
        assert client.form(bytes(2000)).status == 413
        assert client.post(picture()).status == 200


def test_a_body_that_does_not_come_or_is_broken_off_is_no_request() -> None:
    head = b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/png\r\n"
    with serving(settings=ServeSettings(body_s=0.1)) as client:
        with socket.create_connection(("127.0.0.1", client.port), timeout=60) as caller:
            caller.sendall(head + b"Content-Length: 10\r\n\r\n12345")
            assert caller.recv(1000).startswith(b"HTTP/1.1 408 ")
        assert client.metric('labctl_errors_total{reason="slow_body"}') == 1
    with serving() as client:
        with socket.create_connection(("127.0.0.1", client.port), timeout=60) as caller:
            caller.sendall(head + b"Content-Length: 10\r\n\r\n12345")
        name = 'labctl_errors_total{reason="cut_off"}'
        deadline = time.monotonic() + 120
        while client.metric(name) != 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_too_many_files_and_an_unknown_type_are_refused() -> None:
    with serving(settings=ServeSettings(max_images=3)) as client:
        for count in (4, 9):
            reply = client.form(*[picture()] * count)
            assert (reply.status, reply.reason) == (413, "too_many")
        reply = client.post(picture(), "text/plain")
        assert (reply.status, reply.reason) == (415, "unknown_type")
        assert "curl -F image=@" in reply.json()["error"]["message"]
        assert client.post(b"x", "multipart/form-data").status == 400


def test_what_all_requests_hold_together_is_bounded_and_given_back() -> None:
    small = picture(size=(10, 10))
    bound = len(small) + 400
    with serving(settings=ServeSettings(max_held_bytes=bound)) as client:
        for _ in range(3):
            assert client.post(small).status == 200
        reply = client.post(picture(size=(20, 20)))
        assert (reply.status, reply.reason) == (503, "busy")
        assert reply.headers["retry-after"] == "1"
        assert client.post(small).status == 200


class Odd(Brightness):
    def predict(self, images: list[Image.Image]) -> list[list[float]]:
        rows = super().predict(images)
        return [[math.nan, math.nan] if row[1] < 0.1 else row for row in rows]


class Short(Brightness):
    def predict(self, images: list[Image.Image]) -> list[list[float]]:
        return [row[:1] for row in super().predict(images)]


class Broken(Brightness):
    def predict(self, images: list[Image.Image]) -> list[list[float]]:
        raise ValueError("the project's own words")


@pytest.mark.parametrize(
    ("predictor", "reason"),
    [(Odd(), "not_a_number"), (Short(), "model_failed"), (Broken(), "model_failed")],
)
def test_a_model_that_gives_nonsense_is_an_error_and_no_answer(
    predictor: Brightness, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(model(predictor)) as client:
        reply = client.post(picture(0))
        assert (reply.status, reply.reason) == (500, reason)
        assert "own words" not in reply.text
        assert client.get("/healthz").status == 200
    assert ("own words" in capsys.readouterr().err) == isinstance(predictor, Broken)


def test_who_calls_it_by_another_name_is_not_answered() -> None:
    with serving() as client:
        for path in ("/", "/healthz", "/metrics"):
            assert client.get(path).status == 200
            assert client.get(path, Host="evil.example").status == 400


def test_health_tells_the_model_and_whether_drift_is_measured() -> None:
    with serving() as client:
        told = client.get("/healthz").json()
    assert told["status"] == "ok"
    assert told["model"] == {"run": "first", "checkpoint": "step-00000001", "classes": 2}
    assert told["drift"] == "not measured"


def test_metrics_count_requests_batches_and_predictions() -> None:
    with serving() as client:
        assert client.metric("labctl_waiting_images") == 0
        for value in (0, 255, 255):
            client.post(picture(value))
        client.form(*[picture(255)] * 4)
        assert client.metric('labctl_requests_total{status="200"}') == 4
        assert client.metric("labctl_request_seconds_count") == 4
        assert client.metric("labctl_batch_images_sum") == 7
        assert client.metric('labctl_batch_images_bucket{le="+Inf"}') == 4
        assert client.metric('labctl_predictions_total{class="light"}') == 6
        assert client.metric('labctl_predictions_total{class="dark"}') == 1
        assert client.metric("process_resident_memory_bytes")


def test_drift_is_told_once_there_is_enough_to_compare_and_never_without_a_reference() -> None:
    def after(reference: tuple[int, ...], values: list[int]) -> tuple[float | None, float | None]:
        with serving(model(reference=reference)) as client:
            for value in values:
                client.post(picture(value))
            drift = client.metric("labctl_prediction_drift")
            return drift, client.metric("labctl_prediction_drift_by_chance")

    alike = [0, 255] * 50
    assert after((100, 100), alike[:99]) == (None, None)
    assert after((), alike) == (None, None)
    index, by_chance = after((100, 100), alike)
    assert index == pytest.approx(0, abs=1e-6)
    assert by_chance == pytest.approx(1 / 100 + 1 / 200)
    index, _ = after((100, 100), [255] * 100)
    assert index is not None
    assert index > 2


class Larger:
    """Tells which of two columns is larger; a missing value is as small as can be."""

    classes = ("dark", "light")

    def __init__(self) -> None:
        self.rows: list[list[float]] = []

    def predict(self, rows: list[list[float]]) -> list[list[float]]:
        self.rows += rows
        return [[float(not b > a), float(b > a)] for a, b in rows]


def serve_table(larger: Larger) -> Model:
    return Model(larger, larger.classes, "step-00000001", (), ("width", "height"))


def test_rows_of_a_table_are_classified_as_lists_and_by_name() -> None:
    larger = Larger()
    with serving(serve_table(larger)) as client:
        lists = client.json({"rows": [[1, 2.5], [3, None]]})
        names = client.json({"rows": [{"height": 7, "width": 1}, {"width": 2}]})
        health = client.get("/healthz").json()
        how = client.get("/").json()["POST /predict"]
    for reply in (lists, names):
        assert reply.status == 200, reply.text
        assert [one["class"] for one in reply.json()["predictions"]] == ["light", "dark"]
    assert larger.rows[2] == [1.0, 7.0]
    assert health["model"]["columns"] == ["width", "height"]
    assert "width, height" in how


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"rows": []}, 400, "no_rows"),
        ({"image": "iVBORw0KGgo="}, 400, "no_rows"),
        ([[1, 2]], 400, "no_rows"),
        ({"rows": [[1, 2]] * 33}, 413, "too_many"),
        ({"rows": [[1, 2, 3]]}, 422, "bad_row"),
        ({"rows": [7]}, 422, "bad_row"),
        ({"rows": [{"depth": 7}]}, 422, "bad_row"),
        ({"rows": [[1, "2"]]}, 422, "bad_row"),
        ({"rows": [[1, True]]}, 422, "bad_row"),
        ({"rows": [[1, math.inf]]}, 422, "bad_row"),
        ({"rows": [[1, 10**400]]}, 422, "bad_row"),
        ({"rows": [[1, [2]]]}, 422, "bad_row"),
    ],
)
def test_rows_that_are_none_never_reach_the_model(body: object, status: int, reason: str) -> None:
    larger = Larger()
    with serving(serve_table(larger)) as client:
        reply = client.json(body)
        picture_reply = client.post(picture())
    assert (reply.status, reply.reason) == (status, reason)
    assert (picture_reply.status, picture_reply.reason) == (415, "unknown_type")
    assert larger.rows == []
