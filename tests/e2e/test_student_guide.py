"""The transcripts of docs/student.md that need a server, from `labctl up` to `labctl down`."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_directory import LAB_YAML, make_lab
from transcripts import Session, make_program, replay

PAGE = Path(__file__).parents[2] / "docs" / "student.md"
pytestmark = pytest.mark.engine
# Stands for the sample's training, which needs PyTorch; tests/e2e/test_readme_walk.py runs that.
TRAIN = """\
echo "test accuracy 0.9963 (268 of 269) with step-00000320, 26.5 s of training"
echo weights > "$LABCTL_CHECKPOINT_DIR/model.bin"
"""


@pytest.mark.long
def test_the_student_guide_shows_what_labctl_prints(
    tmp_path: Path, base_image: str, server_image: str
) -> None:
    lab = make_lab(tmp_path, "digits", base_image)
    text = LAB_YAML.format(name="digits", local="").replace("secrets: [E2E_TOKEN]\n", "")
    (lab.root / "lab.yaml").write_text(text)
    (lab.root / "train.sh").write_text(TRAIN)
    environ = {**lab.environ, "PATH": f"{make_program(tmp_path)}:{lab.environ['PATH']}"}
    try:
        assert "\n".join(replay(PAGE, "server", Session(lab.root, environ))) == ""
    finally:
        lab.labctl("down", "--yes", "--discard")
