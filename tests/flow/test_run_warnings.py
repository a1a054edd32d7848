"""What `labctl run` says of a command that is probably a mistake, before the run starts."""

from __future__ import annotations

from lab_world import Labctl, World


def test_a_path_without_its_data_directory_is_noticed(run_lab: World, labctl: Labctl) -> None:
    lab = run_lab.home / "lab"
    (lab / "photos").mkdir()
    (lab / "lab.yaml").write_text("lab: digits\nimage: small:1\ndata: {birds: ./photos}\n")
    output = labctl(run_lab, "run", "--", "ls", "/birds")
    assert output.code == 0
    text = output.err.replace("\n", " ")
    assert "runs have their data at /lab/data, and the command reads /birds." in text
    assert "labctl run -- ls /lab/data/birds " in text
    assert "/lab/data" not in labctl(run_lab, "run", "--", "ls", "/lab/data/birds").err
