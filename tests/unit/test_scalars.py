"""TensorBoard's event files, whole, cut and damaged, read without TensorBoard."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
from event_files import curve, event, field, record, restart, scalar, tensor, varint
from hypothesis import given
from hypothesis import strategies as st

from labctl.insight import scalars
from labctl.insight.scalars import Flaw, masked_crc, read_scalars

NAME = "events.out.tfevents.1700000000.host.1.0"


def write(directory: Path, content: bytes, name: str = NAME) -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_the_checksum_is_the_one_of_the_standard() -> None:
    """RFC 3720, B.4: 32 bytes of zeros give 8A9136AA; the mask is TFRecord's."""
    crc = 0x8A9136AA
    assert masked_crc(bytes(32)) == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_what_pytorch_writes_is_read_to_the_last_bit(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch.utils.tensorboard", reason="needs PyTorch")
    with torch.SummaryWriter(str(tmp_path)) as writer:
        for step in range(300):
            writer.add_scalar("train/loss", 1 / (step + 1), step)
        writer.add_scalar("new/style", 2.5, 7, new_style=True)
        writer.add_scalar("odd/nan", math.nan, 1)
        writer.add_scalar("odd/below", -math.inf, -3)
        writer.add_text("words", "are no scalar", 1)
    with torch.SummaryWriter(str(tmp_path), purge_step=200) as writer:
        writer.add_scalar("train/loss", 9.0, 200)
    found = read_scalars(tmp_path)
    assert (found.files, found.flaws) == (2, ())
    assert [one.tag for one in found.series] == [
        "new/style",
        "odd/below",
        "odd/nan",
        "train/loss",
    ]
    loss = found.get("train/loss")
    assert loss is not None
    assert loss.steps == tuple(range(201))
    assert loss.values[:200] == tuple(
        struct.unpack("f", struct.pack("f", 1 / (n + 1)))[0] for n in range(200)
    )
    assert loss.values[200] == 9.0
    assert found.get("nothing") is None
    below = found.get("odd/below")
    assert below is not None
    assert (below.steps, below.values) == ((-3,), (-math.inf,))


def test_no_directory_and_no_files_are_nothing(tmp_path: Path) -> None:
    assert read_scalars(tmp_path / "absent") == read_scalars(tmp_path) == scalars.Scalars()
    write(tmp_path, b"")
    assert read_scalars(tmp_path) == scalars.Scalars(files=1)


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b"\x08\x01" + field(4, struct.pack("<f", 1.5)), 1.5),
        (b"\x08\x02" + field(4, struct.pack("<d", 0.1)), 0.1),
        (b"\x08\x01" + field(5, struct.pack("<f", 0.5)), 0.5),
        (b"\x08\x01\x2d" + struct.pack("<f", 0.25), 0.25),
        (b"\x08\x02\x31" + struct.pack("<d", 0.2), 0.2),
        (b"\x08\x03\x38" + varint(-4), -4.0),
        (b"\x08\x09" + field(10, varint(12)), 12.0),
    ],
)
def test_a_scalar_in_a_tensor(content: bytes, value: float, tmp_path: Path) -> None:
    write(tmp_path, tensor("epoch_loss", 3, content), f"train/{NAME}")
    write(tmp_path, tensor("epoch_loss", 3, content), f"validation/{NAME}")
    found = read_scalars(tmp_path)
    assert [one.tag for one in found.series] == ["train/epoch_loss", "validation/epoch_loss"]
    assert {one.values for one in found.series} == {(value,)}


@pytest.mark.parametrize(
    "content", [b"\x08\x07" + field(8, b"text"), b"\x08\x01" + field(5, bytes(8)), b"\x08\x02", b""]
)
def test_a_tensor_that_is_no_scalar_is_passed_over(content: bytes, tmp_path: Path) -> None:
    write(tmp_path, tensor("words", 1, content))
    assert read_scalars(tmp_path) == scalars.Scalars(files=1)


def test_a_restart_forgets_and_a_step_that_comes_again_replaces(tmp_path: Path) -> None:
    write(tmp_path, curve("a", [1, 2, 3, 4]) + restart(31) + scalar("a", 40, 5), "tfevents.1")
    write(tmp_path, scalar("a", 20, 6) + scalar("b", 1, 7), "tfevents.2")
    first, second = read_scalars(tmp_path).series
    assert (first.steps, first.values) == ((10, 20), (1.0, 6.0))
    assert (second.steps, second.values) == ((1,), (7.0,))


def test_a_file_cut_at_any_byte_gives_what_was_whole(tmp_path: Path) -> None:
    whole = curve("loss", [3, 2, 1])
    each = len(whole) // 3
    for length in range(len(whole) + 1):
        write(tmp_path, whole[:length])
        found = read_scalars(tmp_path)
        values = found.series[0].values if found.series else ()
        assert values == (3.0, 2.0, 1.0)[: length // each]
        cut = () if length % each == 0 else (length // each * each,)
        assert tuple(flaw.at_byte for flaw in found.flaws) == cut
        assert all(flaw.cut for flaw in found.flaws)


def test_any_byte_may_be_wrong_and_none_is_believed(tmp_path: Path) -> None:
    whole = curve("loss", [3, 2, 1])
    for at in range(len(whole)):
        write(tmp_path, whole[:at] + bytes([whole[at] ^ 0x20]) + whole[at + 1 :])
        found = read_scalars(tmp_path)
        values = found.series[0].values if found.series else ()
        assert len(values) < 3
        assert set(values) <= {3.0, 2.0, 1.0}
        assert found.flaws


def test_damaged_data_is_passed_over_and_a_damaged_length_ends_it(tmp_path: Path) -> None:
    one, two, three = (scalar("loss", step, step) for step in (1, 2, 3))
    write(tmp_path, one + two[:-6] + b"??" + two[-4:] + three)
    found = read_scalars(tmp_path)
    assert found.series[0].steps == (1, 3)
    assert found.flaws == (Flaw(file=NAME, at_byte=len(one), what=found.flaws[0].what),)
    assert "1 damaged record" in found.flaws[0].what
    write(tmp_path, one + b"\xff" + two[1:] + three)
    found = read_scalars(tmp_path)
    assert found.series[0].steps == (1,)
    assert "the rest was not read" in found.flaws[0].what


def test_a_length_beyond_all_bounds_asks_for_no_memory(tmp_path: Path) -> None:
    length = struct.pack("<Q", 2**63)
    write(tmp_path, scalar("a", 1, 1) + length + struct.pack("<I", masked_crc(length)) + b"x")
    found = read_scalars(tmp_path)
    assert (found.series[0].values, found.flaws[0].cut) == ((1.0,), True)


def test_what_is_large_is_no_scalar(tmp_path: Path) -> None:
    picture = record(bytes(scalars.LARGEST_RECORD_BYTES + 1))
    write(tmp_path, scalar("a", 1, 1) + picture + scalar("a", 2, 2))
    found = read_scalars(tmp_path)
    assert (found.series[0].values, found.flaws) == ((1.0, 2.0), ())


@given(st.binary(max_size=200))
def test_no_content_of_a_record_is_a_surprise(content: bytes) -> None:
    curves = scalars._Curves()
    for made in (record(content), event(1, content), event(1, field(5, field(1, content)))):
        data = made[12:-4]
        try:
            scalars._event(data, "", curves)
        except (ValueError, struct.error):
            continue


def test_more_than_can_be_looked_at_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scalars, "MOST_POINTS", 5)
    monkeypatch.setattr(scalars, "MOST_TAGS", 3)
    monkeypatch.setattr(scalars, "MOST_FILES", 2)
    write(tmp_path, curve("a", [1.0] * 9))
    assert "more than 5 points" in read_scalars(tmp_path).flaws[0].what
    write(tmp_path, b"".join(scalar(f"tag{n}", 1, 1) for n in range(5)))
    assert "more than 3 curves" in read_scalars(tmp_path).flaws[0].what
    for number in range(4):
        write(tmp_path, scalar("a", 1, 1), f"tfevents.{number}/{NAME}")
    (tmp_path / NAME).unlink()
    assert "4 files: only the first 2 were read" in read_scalars(tmp_path).flaws[0].what


def test_links_lead_nowhere(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", scalar("secret", 1, 1))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / NAME).symlink_to(outside)
    (tmp_path / "logs" / "more").symlink_to(outside.parent)
    assert read_scalars(tmp_path / "logs") == scalars.Scalars()
