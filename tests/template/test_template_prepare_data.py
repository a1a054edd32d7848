from __future__ import annotations

import json
from pathlib import Path

import prepare_data
import pytest
from PIL import Image

pytestmark = pytest.mark.train


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != "dataset.json"
    }


def draw(path: Path, mode: str = "RGB", shade: int = 0, size: tuple[int, int] = (20, 14)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, (shade,) * 3 if mode == "RGB" else shade).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for label in ("cat", "dog"):
        for number in range(10):
            draw(tmp_path / "photos" / label / f"{number}.jpg", shade=20 * number)
        draw(tmp_path / "photos" / label / "more" / "0.PNG", mode="L")
        (tmp_path / "photos" / label / "notes.txt").write_text("not an image")
    return tmp_path / "photos"


def test_the_digits_are_the_same_every_time(digits: Path, tmp_path: Path) -> None:
    prepare_data.prepare(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(digits)


def test_the_digits_are_split_by_class_and_each_lies_in_one_split(digits: Path) -> None:
    names = [path.name for path in digits.rglob("*.png")]
    assert len(names) == len(set(names)) == 1797
    for part, share in (("train", 0.7), ("val", 0.15), ("test", 0.15)):
        for label in "0123456789":
            found = len(list((digits / part / label).iterdir()))
            assert found == pytest.approx(share * 180, abs=6)
    counts = json.loads((digits / "dataset.json").read_text())["images"]
    assert counts == {part: len(list((digits / part).rglob("*.png"))) for part in counts}


def test_the_pixels_are_those_of_scikit_learn(digits: Path) -> None:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    (path,) = digits.glob("*/0/digit-0000.png")
    with Image.open(path) as picture:
        assert (picture.mode, picture.size) == ("L", (8, 8))
        pixels = list(picture.tobytes())
    assert pixels == [round(value * 255 / 16) for value in load_digits().images[0].flatten()]


def test_another_seed_makes_another_split(digits: Path, tmp_path: Path) -> None:
    prepare_data.prepare(tmp_path / "other", seed=1)
    assert contents(tmp_path / "other").keys() != contents(digits).keys()


def test_a_second_time_touches_nothing(tmp_path: Path) -> None:
    assert prepare_data.prepare(tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert not prepare_data.prepare(tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


def test_it_does_not_write_over_something_else(tmp_path: Path, photos: Path) -> None:
    with pytest.raises(prepare_data.DatasetError, match="something else"):
        prepare_data.prepare(photos)
    prepare_data.prepare(tmp_path / "out")
    with pytest.raises(prepare_data.DatasetError, match="was made from"):
        prepare_data.prepare(tmp_path / "out", photos)


def test_any_folder_of_classes_is_split(tmp_path: Path, photos: Path) -> None:
    prepare_data.prepare(tmp_path / "out", photos)
    for label in ("cat", "dog"):
        counts = [
            len(list((tmp_path / "out" / part / label).iterdir()))
            for part in ("train", "val", "test")
        ]
        assert counts == [7, 2, 2]
        (nested,) = (tmp_path / "out").glob(f"*/{label}/more__0.PNG")
        assert nested.read_bytes() == (photos / label / "more" / "0.PNG").read_bytes()


def test_folders_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    draw(tmp_path / "one" / "cat" / "0.png")
    with pytest.raises(prepare_data.DatasetError, match="two folders"):
        prepare_data.prepare(tmp_path / "out", tmp_path / "one")
    draw(tmp_path / "one" / "dog" / "0.png")
    with pytest.raises(prepare_data.DatasetError, match="class cat has 1 images"):
        prepare_data.prepare(tmp_path / "out", tmp_path / "one")
    draw(tmp_path / "split" / "train" / "cat" / "0.png")
    with pytest.raises(prepare_data.DatasetError, match="split already"):
        prepare_data.prepare(tmp_path / "out", tmp_path / "split")


def test_half_a_dataset_is_never_left(tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        raise OSError("disk full")

    images = [
        prepare_data.Image("a", f"{number}.png", lambda to: to.touch()) for number in range(5)
    ]
    parts = {"train": images, "val": [prepare_data.Image("a", "x.png", fail)]}
    with pytest.raises(OSError, match="disk full"):
        prepare_data.write(tmp_path / "out", parts, {})
    assert list(tmp_path.iterdir()) == []
