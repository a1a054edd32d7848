"""Files that must not be handed in: pickles that run code, archives that explode, secrets."""

from __future__ import annotations

import collections
import gzip
import io
import os
import pickle
import struct
import tarfile
import time
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
from submission_bed import bomb

from labctl.shell import Secret
from labctl.submissions.leaks import SHAPES, LeakSearch, SecretFinding, describe_leaks
from labctl.wire import pickles
from labctl.wire.judge import judge_file

TENSOR = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00ctorch\nFloatStorage\nq\x01\x86q\x02."


class Evil:
    def __init__(self, call: Callable[..., Any], *words: Any) -> None:
        self.call = (call, words)

    def __reduce__(self) -> Any:
        return self.call


def reasons(content: bytes, path: str = "model/m.bin") -> str:
    return judge_file(path, io.BytesIO(content), len(content)).hazard


def zipped(**files: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickle_that_runs_something_is_refused_by_its_name(protocol: int) -> None:
    evil = pickle.dumps(Evil(os.system, "id"), protocol)
    assert reasons(evil, "model/anything.safetensors") == f"loading it would run '{os.name}.system'"
    assert "eval" in reasons(pickle.dumps([1, {"a": Evil(eval, "1")}], protocol))


@pytest.mark.parametrize("protocol", [0, 1])
def test_old_pickles_are_known_by_what_their_name_promises(protocol: int) -> None:
    evil = pickle.dumps(Evil(os.system, "id"), protocol)
    for suffix in (".pkl", ".pt", ".pth", ".joblib", ".PKL", ".ckpt", ".pt.tmp"):
        assert "system" in reasons(evil, f"model/m{suffix}"), suffix


@pytest.mark.parametrize(
    "body",
    [
        b"cposix\nsystem\n(S'id'\ntR.",
        b"(S'id'\niposix\nsystem\n.",
        b"\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R.",
        # The name comes from the memo, or what looks allowed lies elsewhere on the stack.
        b"\x8c\x05posixq\x07\x8c\x06systemq\x08h\x07h\x08\x93\x8c\x02id\x85R.",
        b"\x8c\x05posix\x8c\x06system\x8c\x0bcollections\x8c\x0bOrderedDict00\x93\x8c\x02id\x85R.",
        b"\x8c\x0bcollectionsq\x01\x8c\x05posixq\x01\x8c\x06systemq\x02h\x01h\x02\x93.",
        b"\x8c\x05posix\x8c\x06system\x86\x8c\x0bcollections\x8c\x0bOrderedDict\x93.",
        b"\x82\x01.",
    ],
)
def test_no_way_of_naming_hides_what_is_run(body: bytes) -> None:
    said = reasons(b"\x80\x04" + body)
    allowed = b"OrderedDict\x93" in body
    assert bool(said) is not allowed, said


def test_two_texts_that_are_not_on_top_are_believed_by_nobody() -> None:
    # POP brings posix.system back to the top; only what cannot be mistaken is believed.
    hidden = b"\x80\x04\x8c\x05posix\x8c\x06system\x8c\x01a0\x93\x8c\x02id\x85R."
    assert "hides" in reasons(hidden)


def test_what_comes_before_a_pickle_breaks_off_has_run_already() -> None:
    cut = pickle.dumps(Evil(os.system, "id"), 4)[:-1] + b"\xff\xff"
    assert "system" in reasons(cut)


def test_weights_and_plain_data_may_be_pickled() -> None:
    data = {"w": [1.0, 2.0], "names": ("a", b"b"), "counts": collections.Counter("aab")}
    plain = pickle.dumps(collections.OrderedDict(data), 4)
    for suffix in (".pkl", ".pt", ".bin"):
        assert reasons(plain, f"model/m{suffix}") == ""
    assert reasons(TENSOR, "model/m.pt") == ""
    # PyTorch's old format: several pickles, then the numbers.
    assert reasons(plain + TENSOR + b"\x00\x01\x02" * 100, "model/m.pth") == ""
    assert "system" in reasons(TENSOR + pickle.dumps(Evil(os.system, "id"), 2), "model/m.pth")


def test_a_pickle_behind_another_needs_no_mark_of_its_own() -> None:
    """PyTorch's old format is several pickles, and each may be of another protocol."""
    for protocol in (0, 1, 2):
        evil = pickle.dumps(Evil(os.system, "id"), protocol)
        assert "system" in reasons(TENSOR + TENSOR + evil, "model/m.pth"), protocol


@pytest.mark.parametrize(
    "body",
    [
        b"I0x10\n0cposix\nsystem\n(S'id'\ntR.",  # C reads hexadecimal numbers, pickletools does not
        b"Sid\n0cposix\nsystem\n.",
        "cmödul\nname\n.".encode(),
        b"]]\x93",
    ],
)
def test_where_readers_differ_nothing_is_believed(body: bytes) -> None:
    for path in ("model/m.bin", "model/m.pt"):
        assert reasons(b"\x80\x04" + body, path), path


def test_a_pickle_longer_than_what_is_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    evil = pickle.dumps([b"x" * 5000, Evil(os.system, "id")], 4)
    assert "system" in reasons(evil)
    monkeypatch.setattr("labctl.wire.pickles.MAX_BYTES", 3000)
    assert "is longer than" in reasons(evil)
    # The numbers behind a short pickle may be as many as they like.
    assert reasons(TENSOR + bytes(90_000), "model/m.pt") == ""


@pytest.mark.parametrize(
    "descr", ["'|O'", "'O8'", "'\\x7cO'", "[('a', '<f8'), ('b', '|O')]", "('O', (2,))", "open('x')"]
)
def test_however_numpy_spells_objects_they_are_objects(descr: str) -> None:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': (1,), }}\n".encode()
    head = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    assert reasons(head + pickle.dumps(Evil(os.system, "id"), 2), "model/a.npy")


def test_a_pickle_does_not_fill_the_receivers_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte for each thing that is kept would be a hundred here: 64 MiB of them are 5 GB."""
    monkeypatch.setattr(pickles, "MAX_KEPT", 1000)
    for step, count in ((b"\x94", 1001), (b"q\x01", 10**5)):
        body = b"\x80\x04N" + step * count + b"."
        reason = "its pickle has more than 1000 memo entries, and cannot be inspected"
        assert reasons(body, "model/m.pkl") == (reason if count == 1001 else "")


def test_what_promises_a_pickle_and_cannot_be_read_is_refused() -> None:
    for content in (b"\x1f\x8b" + bytes(20), b"not a pickle", b"\x78\x9c" + bytes(30)):
        assert "cannot be inspected" in reasons(content, "model/forest.joblib")
    assert reasons(b"", "model/empty.pkl") == ""


def test_numbers_that_begin_like_a_pickle_are_numbers() -> None:
    assert reasons(b"\x80\x02" + bytes(range(256)), "model/m.safetensors") == ""
    length = struct.pack("<Q", 0x0280)
    assert reasons(length + b"{}".ljust(0x280) + bytes(100), "model/m.safetensors") == ""


def test_pytorchs_archives_are_opened() -> None:
    good = zipped(**{"m/data.pkl": TENSOR, "m/data/0": b"\x80\x02" + bytes(64)})
    assert reasons(good, "model/m.pt") == ""
    evil = zipped(**{"m/data.pkl": pickle.dumps(Evil(os.system, "id"), 2)})
    assert "'m/data.pkl' in it: loading it would run" in reasons(evil, "model/m.bin")
    script = zipped(**{"m/data.pkl": TENSOR, "m/code/__torch__/net.py": b"def forward(): pass"})
    assert "TorchScript" in reasons(script, "model/m.pt")


def test_pytorchs_first_format_is_a_tar_of_pickles() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        evil = pickle.dumps(Evil(os.system, "id"), 2)
        info = tarfile.TarInfo("storages")
        info.size = len(evil)
        archive.addfile(info, io.BytesIO(evil))
    for path in ("model/m.pt", "model/pytorch_model.bin", "model/m"):
        assert "it is a tar archive" in reasons(out.getvalue(), path)


def test_numpys_arrays_of_objects_are_pickles() -> None:
    numpy = pytest.importorskip("numpy")

    def saved(array: Any) -> bytes:
        out = io.BytesIO()
        numpy.save(out, array, allow_pickle=True)
        return out.getvalue()

    evil = saved(numpy.array([Evil(os.system, "id")], dtype=object))
    assert "system" in reasons(evil, "model/a.npy")
    assert "'a.npy' in it" in reasons(zipped(**{"a.npy": evil}), "model/a.npz")
    assert reasons(saved(numpy.arange(1000.0)), "model/a.npy") == ""
    assert reasons(zipped(**{"a.npy": saved(numpy.arange(9))}), "model/a.npz") == ""


def test_zip_bombs_are_named_without_being_unpacked() -> None:
    assert "would unpack to 3.0 GiB" in reasons(bomb(), "logs/a.zip")
    assert "may not agree" in reasons(b"GIF89a" + bomb(), "logs/a.gif")
    nested = zipped(**{"inner.bin": bomb()})
    assert "contains another archive" in reasons(nested, "logs/a.zip")


def test_files_that_share_their_bytes_are_a_bomb() -> None:
    whole = zipped(a=os.urandom(40_000))
    start = whole.index(b"PK\x01\x02")
    entry, end = whole[start : whole.index(b"PK\x05\x06")], whole[whole.index(b"PK\x05\x06") :]
    count, body = 50, bytearray(end)
    struct.pack_into("<HH", body, 8, count, count)
    struct.pack_into("<L", body, 12, len(entry) * count)
    assert "is in it twice" in reasons(whole[:start] + entry * count + bytes(body), "logs/a.zip")


def test_a_gzip_bomb_is_counted_not_believed() -> None:
    stream = gzip.compress(bytes(1024 * 1024), 9)
    assert reasons(stream, "logs/a.gz") == ""
    # Streams one after another: a small file of many.
    assert "more than 1.0 GiB" in reasons(stream * 1100, "logs/a.gz")
    assert "damaged gzip" in reasons(stream[:50] + b"garbage" * 20, "logs/a.gz")


def test_what_cannot_be_looked_into_is_refused() -> None:
    data = bytearray(zipped(a=b"hello" * 10))
    for magic, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(magic) + offset] |= 1
    assert "encrypted" in reasons(bytes(data), "logs/a.zip")
    broken = bytearray(zipped(a=os.urandom(100)))
    broken[broken.index(b"PK\x01\x02") + 42] = 0xFF
    assert "may not agree" in reasons(bytes(broken), "logs/a.zip")


def test_text_and_pictures_are_left_alone() -> None:
    for content in (b"import os\nos.system('x')\n", b"\x89PNG\r\n\x1a\n" + bytes(50), b""):
        assert reasons(content, "code/train.py") == ""


SECRETS = {
    b"-----BEGIN OPENSSH PRIVATE KEY-----": "a private key",
    b"-----BEGIN RSA PRIVATE KEY-----": "a private key",
    b"key = AKIAIOSFODNN7EXAMPLE": "an AWS access key",
    b"aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY": "an AWS secret key",
    b"ghp_" + b"a1B2" * 9: "a GitHub token",
    b"github_pat_" + b"a1B2" * 15: "a GitHub token",
    b"glpat-" + b"a1B2" * 5: "a GitLab token",
    b"XOXB: xoxb-0123456789": "a Slack token",
    b"AIza" + b"a1B2_" * 7: "a Google API key",
    b"gho_" + b"a1B2" * 9: "a GitHub token",
    b"ghu_" + b"a1B2" * 9: "a GitHub token",
    b"ghs_" + b"a1B2" * 9: "a GitHub token",
    b"ghr_" + b"a1B2" * 9: "a GitHub token",
    b"temporary = 'ASIAIOSFODNN7EXAMPLE'": "an AWS access key",
    b'AWS_SECRET_ACCESS_KEY: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"': "an AWS secret key",
    b"XOXA: xoxa-0123456789": "a Slack token",
    b"XOXP: xoxp-0123456789": "a Slack token",
    b"XOXR: xoxr-0123456789": "a Slack token",
    b"XOXS: xoxs-0123456789": "a Slack token",
    b"export WANDB_API_KEY=" + b"0123456789" * 4: "a W&B key",
    b"ANTHROPIC=sk-ant-" + b"abcd1234" * 5: "an API key",
    b"a.b-eyJ" + b"a" * 10 + b".eyJ" + b"b" * 10 + b"." + b"c" * 20: "a JWT",
    b"x.eyJ" + b"a" * 10 + b".eyJ" + b"b" * 10 + b"." + b"c" * 20: "a JWT",
    b"postgresql+psycopg://me:hunter22secret@db": "a password in an address",
    b"eyJ" + b"a" * 10 + b".eyJ" + b"b" * 10 + b"." + b"c" * 20: "a JWT",
    b"HF_TOKEN=hf_" + b"abcdEFGH12" * 4: "a Hugging Face token",
    b"wandb.login(key='" + b"0123456789" * 4 + b"')": "a W&B key",
    b"OPENAI='sk-proj-" + b"abcd1234" * 5 + b"'": "an API key",
    b"git clone https://me:hunter22secret@github.com/x": "a password in an address",
}


def test_each_kind_of_secret_is_tried() -> None:
    tried = b"\n".join(SECRETS)
    for shape in SHAPES:
        for mark in shape.marks:
            assert mark in (tried.lower() if shape.ignores_case else tried), mark
    assert set(SECRETS.values()) == {shape.kind for shape in SHAPES}


@pytest.mark.parametrize(("text", "kind"), SECRETS.items())
def test_secrets_are_named_by_file_line_and_kind(text: bytes, kind: str) -> None:
    found = LeakSearch().find_leaks("code/a.py", io.BytesIO(b"# one\n# two\n" + text + b"\n"))
    assert found == [SecretFinding(path="code/a.py", line=3, kind=kind)]
    assert describe_leaks(found) == f"code/a.py, line 3: {kind}"
    assert text.decode()[:20] not in describe_leaks(found)


@pytest.mark.parametrize(
    "text",
    [
        b"desk-" + b"abcd1234" * 5,
        b"half_" + b"abcdEFGH12" * 4,
        b"XAKIAIOSFODNN7EXAMPLE",
        b"word://me:hunter22secret",
        b"9://me:hunter22secret@db",
        b"a.b.eyJ" + b"b" * 10 + b"." + b"c" * 20,
    ],
)
def test_a_mark_inside_a_word_or_without_the_rest_is_no_secret(text: bytes) -> None:
    assert LeakSearch().find_leaks("code/a.py", io.BytesIO(text)) == []


def test_known_values_are_found_wherever_they_stand() -> None:
    search = LeakSearch({"WANDB_API_KEY": Secret("pa$$.word*1"), "PIN": Secret("1234")})
    # Across the border of two blocks, too.
    content = b"x\n" * 524_284 + b"say pa$$.word*1 1234\n"
    found = search.find_leaks("logs/run.log", io.BytesIO(content))
    assert found == [
        SecretFinding(
            path="logs/run.log", line=524_285, kind="the value of your secret WANDB_API_KEY"
        )
    ]


def test_each_place_is_told_once_and_files_by_their_names() -> None:
    line = b"AKIAIOSFODNN7EXAMPLE AKIAIOSFODNN7EXAMPLE\n"
    assert len(LeakSearch().find_leaks("code/a", io.BytesIO(line * 3))) == 3
    assert LeakSearch().find_leaks("code/.env", io.BytesIO(b"A=1\n")) == [
        SecretFinding(path="code/.env", line=0, kind="a file of secrets")
    ]
    assert len(LeakSearch().find_leaks("code/a", io.BytesIO(line * 300))) == 20


def test_data_without_secrets_is_searched_quickly() -> None:
    """450 MB of zeros took more than a minute of CPU."""
    search, zeros = LeakSearch(), bytes(2**20)
    began_s = time.process_time()
    for _ in range(32):
        assert search.find_leaks("code/data.bin", io.BytesIO(zeros)) == []
    assert time.process_time() - began_s < 2


def test_ordinary_code_holds_no_secret() -> None:
    text = (
        b"token = tokenizer('hello')\npassword = input()\nurl = 'https://example.org:8080/a@b'\n"
        b"sha = '" + b"0123456789abcdef" * 4 + b"'\nDATABASE = 'postgres://{user}:{word}@host/db'\n"
    )
    assert LeakSearch().find_leaks("code/a.py", io.BytesIO(text)) == []
