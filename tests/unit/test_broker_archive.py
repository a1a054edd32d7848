"""Images that an account sends: what the broker makes of an archive before the engine reads it."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import tracemalloc
from collections import deque
from collections.abc import Iterator

import pytest

from labctl.agent.broker import image_archive
from labctl.agent.broker.http import HttpRefusal
from labctl.agent.broker.image_archive import retag
from labctl.agent.broker.rules import BrokerAccount
from labctl.agent.broker.strict_json import encode_json, parse_json, parse_query

ALICE = BrokerAccount(71001, 71002, "lab-alice", "/home/lab-alice")
MOST = 1 << 30


def _saved(members: dict[str, bytes], compression: str = "") -> bytes:
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode=f"w:{compression}") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return text.getvalue()


def _pieces(content: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(content), size):
        yield content[at : at + size]


@pytest.mark.parametrize(("size", "compression"), [(7, ""), (100_000, "gz"), (512, "")])
def test_what_is_sent_keeps_its_content_and_loses_its_name(size: int, compression: str) -> None:
    listed = [{"Config": "c.json", "RepoTags": ["pytorch:2"], "Layers": ["l/layer.tar"]}]
    layer = bytes(range(256)) * 1001
    members = {"l/layer.tar": layer, "repositories": b"{}", "index.json": b"{}", "c.json": b"{}"}
    content = _saved({**members, "manifest.json": json.dumps(listed).encode()}, compression)
    passed = b"".join(retag(ALICE, _pieces(content, size), MOST))
    with tarfile.open(fileobj=io.BytesIO(passed)) as tar:
        assert tar.getnames() == ["l/layer.tar", "c.json", "manifest.json"]
        file, manifest = tar.extractfile("l/layer.tar"), tar.extractfile("manifest.json")
        assert file is not None
        assert file.read() == layer
        assert manifest is not None
        assert json.load(manifest)[0]["RepoTags"] == ["labctl-u71001/pytorch:2"]


@pytest.mark.parametrize(
    "members",
    [
        {"c.json": b"{}"},
        {"manifest.json": b"{"},
        {"manifest.json": b"[1]"},
        {"manifest.json": b'[{"RepoTags": null}]'},
        {"manifest.json": b'[{"RepoTags": ["labctl-u71003/x:1"]}]'},
    ],
)
def test_an_archive_that_is_none_of_docker_save_is_refused(members: dict[str, bytes]) -> None:
    with pytest.raises(HttpRefusal):
        list(retag(ALICE, iter([_saved(members)]), MOST))
    with pytest.raises(HttpRefusal):
        list(retag(ALICE, iter([_saved(members)[:300]]), MOST))


LISTED = json.dumps([{"Config": "c", "RepoTags": ["x:1"], "Layers": []}]).encode()
FORGED = json.dumps([{"Config": "c", "RepoTags": ["pytorch:2"], "Layers": []}]).encode()


def _archive(*members: tuple[str, bytes, bytes, str]) -> bytes:
    """(name, kind, content, link) one after the other, whatever they are."""
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, content, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kind, len(content), link
            tar.addfile(info, io.BytesIO(content))
    return text.getvalue()


def _plain_file(name: str, content: bytes) -> tuple[str, bytes, bytes, str]:
    return name, tarfile.REGTYPE, content, ""


@pytest.mark.parametrize(
    "more",
    [
        [_plain_file("manifest.json", FORGED)],
        [_plain_file("./manifest.json", FORGED)],
        [_plain_file("/manifest.json", FORGED)],
        [_plain_file("a/../manifest.json", FORGED)],
        [_plain_file("f", FORGED), ("manifest.json", tarfile.SYMTYPE, b"", "f")],
        [_plain_file("f", FORGED), ("manifest.json", tarfile.LNKTYPE, b"", "f")],
        [("d", tarfile.SYMTYPE, b"", "."), _plain_file("d/manifest.json", FORGED)],
        [("l/layer.tar", tarfile.SYMTYPE, b"", "../manifest.json")],
        [("dev", tarfile.CHRTYPE, b"", "")],
    ],
)
def test_nothing_takes_the_manifests_place(more: list[tuple[str, bytes, bytes, str]]) -> None:
    """Else an account's archive would be everybody's `pytorch:2`."""
    content = _archive(_plain_file("manifest.json", LISTED), *more)
    with pytest.raises(HttpRefusal, match="does not accept this image archive"):
        list(retag(ALICE, iter([content]), MOST))


def _linked(link: str) -> bytes:
    """A link that a pax header names, which may hold any character."""
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("l/layer.tar")
        info.type, info.pax_headers = tarfile.SYMTYPE, {"linkpath": link}
        tar.addfile(info)
        return text.getvalue()  # without the blocks that end an archive


def test_a_link_leads_where_it_says() -> None:
    """The engine reads a short link up to its first NUL: this one leads to the manifest."""
    honest = list(retag(ALICE, iter([_linked("../a/layer.tar") + _sent(LISTED)]), MOST))
    assert b"../a/layer.tar" in b"".join(honest)
    hostile = _linked("../manifest.json\0/layer.tar") + _sent(LISTED)
    with pytest.raises(HttpRefusal, match="invalid"):
        list(retag(ALICE, iter([hostile]), MOST))


def test_no_file_has_a_second_name() -> None:
    """A layer that is written behind a link would take the place of a configuration."""
    members = [
        ("l/layer.tar", tarfile.SYMTYPE, b"", "../b/layer.tar"),
        _plain_file("l/layer.tar/c", b"{}"),
    ]
    for number in range(2):
        behind = _archive(*members[:1], ("l/layer.tar/d", tarfile.DIRTYPE, b"", ""), *members[1:])
        content = behind if number else _archive(*members)
        with pytest.raises(HttpRefusal, match="behind a link"):
            list(retag(ALICE, iter([content]), MOST))


def test_names_are_short() -> None:
    """All of them are held in memory, and they pack well."""
    name = "/".join(["layer" * 20] * 4)
    with pytest.raises(HttpRefusal, match="too long"):
        list(retag(ALICE, iter([_archive(_plain_file(name, b""))]), MOST))


CONFIG = {"architecture": "amd64", "os": "linux", "config": {"Cmd": ["id"], "Env": None}}
CONFIG["rootfs"] = {"type": "layers", "diff_ids": []}


def _sent(manifest: bytes, config: bytes = encode_json(CONFIG)) -> bytes:
    """An image without layers, as its owner's program writes it."""
    return _archive(_plain_file("c", config), _plain_file("manifest.json", manifest))


def _passed(content: bytes) -> dict[str, bytes]:
    """name -> content of what goes on to the engine."""
    text = b"".join(retag(ALICE, iter([content]), MOST))
    with tarfile.open(fileobj=io.BytesIO(text)) as tar:
        files = [(one.name, tar.extractfile(one)) for one in tar.getmembers()]
        return {name: file.read() for name, file in files if file}


@pytest.mark.parametrize(
    "other", ["repotags", "REPOTAGS", "RepoTags", "RepoTag\u017f", "Config", "config", "layers"]
)
def test_a_key_is_named_once_however_it_is_spelled(other: str) -> None:
    """Go's decoder takes the last one, whatever its case: for it, s and the long s are the same."""
    named = '"Config": "c", "RepoTags": ["x:1"], "Layers": []'
    manifest = f'[{{{named}, "{other}": ["pytorch:2"]}}]'
    with pytest.raises(HttpRefusal, match="one key twice"):
        _passed(_sent(manifest.encode()))


@pytest.mark.parametrize(
    "config",
    [
        b'{"config": {"Cmd": ["a"], "cmd": ["b"]}}',
        b'{"config": {}, "Config": {}}',
        b'{"config": {}, "config": {}}',
        b'{"config": {"Labels": {"k": "1", "\xe2\x84\xaa": "2"}}}',
        b'{"config": {"Cmd": "id"}}',
        b'{"config": {"Env": [1]}}',
        b'{"config": {"Labels": {"a": 1}}}',
        b'{"config": {"Volumes": {"/a": {"b": 1}}}}',
        b'{"config": []}',
        b'{"rootfs": {"type": "other"}}',
        b'{"history": [{"empty_layer": 1}]}',
        b'{"config": {"StopTimeout": %s}}' % (b"9" * 100_000),
        b'{"config": {"StopTimeout": NaN}}',
        b'{"config": {"User": "\\ud800"}}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"os": "linux"} {}',
        b'\xef\xbb\xbf{"os": "linux"}',
        '{"os": "linux"}'.encode("utf-16"),
        b' {"os": "linux"}',
        b"",
    ],
)
def test_a_configuration_that_can_be_read_in_two_ways_is_refused(config: bytes) -> None:
    with pytest.raises(HttpRefusal, match="does not accept this image archive"):
        _passed(_sent(LISTED, config))


@pytest.mark.parametrize(
    "manifest",
    [
        b"[]",
        b'{"Config": "c", "RepoTags": ["x:1"], "Layers": []}',
        b'[{"Config": ["c"], "RepoTags": ["x:1"], "Layers": []}]',
        b'[{"Config": "c", "RepoTags": "x:1", "Layers": []}]',
        b'[{"Config": "c", "RepoTags": [["x:1"]], "Layers": []}]',
        b'[{"Config": "c", "RepoTags": ["x:1"], "Layers": {}}]',
        b'[{"Config": "c", "RepoTags": ["x:1"], "Layers": [null]}]',
        b'[{"Config": "c", "RepoTags": ["x:1"], "Layers": ["absent"]}]',
        b'[{"Config": "c", "RepoTags": ["x:1"], "Layers": ["c"]}]',
        b'[{"Config": "absent", "RepoTags": ["x:1"], "Layers": []}]',
        b'[{"Config": "../c", "RepoTags": ["x:1"], "Layers": []}]',
        b'[{"Config": "c", "Layers": []}]',
    ],
)
def test_a_manifest_names_what_is_there(manifest: bytes) -> None:
    with pytest.raises(HttpRefusal, match="does not accept this image archive"):
        _passed(_sent(manifest))


def test_what_goes_on_is_built_of_known_keys() -> None:
    manifest = [{"Config": "./c", "RepoTags": ["x:1"], "Layers": [], "Parent": "sha256:1"}]
    manifest[0]["LayerSources"] = {"sha256:1": {"urls": ["https://example.org"]}}
    config = {**CONFIG, "parent": "sha256:1", "id": "1", "moby.buildkit.cache.v0": "x"}
    passed = _passed(_sent(json.dumps(manifest).encode(), json.dumps(config).encode()))
    own = [{"Config": "c", "RepoTags": ["labctl-u71001/x:1"], "Layers": []}]
    assert {name: parse_json(text) for name, text in passed.items()} == {
        "c": CONFIG,
        "manifest.json": own,
    }


def test_an_image_that_an_engine_saved_keeps_its_id() -> None:
    """Which is the hash of its configuration, every byte of it."""
    config = (
        '{"architecture":"amd64","config":{"Hostname":"","AttachStdin":false,"Env":["PATH=/bin"],'
        '"Cmd":["sh","-c","a \\u003c b \\u0026\\u0026 c \\u003e d é \\u2028"],"Image":"","Volumes":'
        'null,"OnBuild":null,"Labels":{"labctl.lab-id":"1"}},"container_config":{"Cmd":null},'
        '"created":"2026-11-22T04:48:24.937504941Z","docker_version":"20.10.24","history":[{'
        '"created_by":"\\"x\\"\\t","empty_layer":true}],"os":"linux","rootfs":{"type":"layers",'
        '"diff_ids":["sha256:0d72"]}}'
    ).encode()
    assert _passed(_sent(LISTED, config))["c"] == config


@pytest.mark.parametrize(
    "twice",
    [
        [_plain_file("c", b"{}")],
        [_plain_file("./c", b"not a document, and passed as it is")],
        [_plain_file("l/layer.tar", b"1"), _plain_file("l/layer.tar", b"2")],
        [_plain_file("l/layer.tar", b"1"), ("l/layer.tar", tarfile.SYMTYPE, b"", "../m/layer.tar")],
    ],
)
def test_no_file_takes_anothers_place(twice: list[tuple[str, bytes, bytes, str]]) -> None:
    named = _plain_file("c", b"{}"), _plain_file("manifest.json", LISTED)
    with pytest.raises(HttpRefusal, match="in it twice"):
        _passed(_archive(*named, *twice))


def test_documents_that_no_manifest_names_go_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """An OCI layout's own documents, and those of old engines; layers that begin alike do."""
    layer = b"{{cookiecutter}}/" + bytes(1000)
    manifest = b'[{"Config": "c", "RepoTags": ["x:1"], "Layers": ["l"]}]'
    others = [_plain_file(name, b'{"a":1}') for name in ("index.json", "oci-layout", "l1/json")]
    files = [*others, _plain_file("c", encode_json(CONFIG)), _plain_file("l", layer)]
    passed = _passed(_archive(_plain_file("manifest.json", manifest), *files))
    assert list(passed) == ["c", "l", "manifest.json"]
    assert passed["l"] == layer
    monkeypatch.setattr(image_archive, "MOST_DOCUMENTS", 900)
    with pytest.raises(HttpRefusal, match="documents are more than"):
        _passed(_archive(_plain_file("manifest.json", manifest), *files))


@pytest.mark.parametrize("text", ["a=1&a=2", "a=1&A=2", "k=1&%E2%84%AA=2", "a=%FF", "a=1&" * 99])
def test_a_query_is_read_in_one_way_only(text: str) -> None:
    with pytest.raises(ValueError):
        parse_query(text)
    assert parse_query("a=b%20c&d") == {"a": "b c", "d": ""}


def test_a_layer_may_be_named_twice_and_names_may_be_long() -> None:
    twice = ("b/layer.tar", tarfile.SYMTYPE, b"", "../a/layer.tar")
    long = f"{'n' * 200}/layer.tar"
    named = [("a", tarfile.DIRTYPE, b"", ""), _plain_file("a/layer.tar", b"1"), twice]
    config = _plain_file("c", b"{}")
    content = _archive(
        *named, _plain_file(long, b"2"), _plain_file("manifest.json", LISTED), config
    )
    passed = b"".join(retag(ALICE, _pieces(content, 333), MOST))
    with tarfile.open(fileobj=io.BytesIO(passed)) as tar:
        assert tar.getnames() == ["a", "a/layer.tar", "b/layer.tar", long, "c", "manifest.json"]
        assert tar.getmember("b/layer.tar").linkname == "../a/layer.tar"


def test_a_bomb_is_counted_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the archive is packed or a layer in it: neither memory nor disk is filled."""
    most = 8 * 1024**2
    bomb = gzip.compress(bytes(4 * most))
    whole = gzip.compress(_archive(_plain_file("l", bytes(4 * most))))
    behind = _archive(_plain_file("l/layer.tar", gzip.compress(b"small") + bomb))
    for content in (whole, _archive(_plain_file("l/layer.tar", bomb)), behind):
        tracemalloc.start()
        with pytest.raises(HttpRefusal, match="larger than the shared server allows"):
            deque(retag(ALICE, _pieces(content, 4096), most), maxlen=0)
        assert tracemalloc.get_traced_memory()[1] < most // 2
        tracemalloc.stop()
    zstandard = (b"(\xb5/\xfd", b"P*M\x18\1\0\0\0x(\xb5/\xfd", b"_*M\x18")
    for other in (bz2.compress(whole), lzma.compress(whole), *zstandard):
        with pytest.raises(HttpRefusal, match=r"gzip|not an archive|truncated"):
            list(retag(ALICE, iter([other]), most))
        with pytest.raises(HttpRefusal, match="compression other than gzip"):
            list(retag(ALICE, _pieces(_archive(_plain_file("l", other)), 1), most))
    monkeypatch.setattr(image_archive, "MOST_MEMBERS", 3)
    with pytest.raises(HttpRefusal, match="more than 3 files"):
        list(retag(ALICE, iter([_archive(*[_plain_file(name, b"") for name in "abcde"])]), most))


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_of_any_length_is_not_taken_into_memory(kind: bytes) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, 1 << 40
    with pytest.raises(HttpRefusal, match="too long"):
        list(retag(ALICE, iter([info.tobuf(tarfile.GNU_FORMAT)]), MOST))
