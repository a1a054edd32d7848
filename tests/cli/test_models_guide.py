"""docs/models.md names every sample project, and its listing is what labctl prints."""

from __future__ import annotations

from pathlib import Path

from transcripts import list_steps, make_session, replay

from labctl.lifecycle.project_templates import PROJECT_TEMPLATES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_names_every_template_and_links_to_its_readme() -> None:
    text = PAGE.read_text()
    links = {name: f"[`{name}`](../templates/{name}/README.md)" for name in PROJECT_TEMPLATES}
    assert [name for name, link in links.items() if link not in text] == []


def test_the_listing_is_what_labctl_prints(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    session = make_session(tmp_path, tmp_path / "empty", {})
    assert "\n".join(replay(PAGE, "here", session)) == ""


def test_every_transcript_of_the_page_is_replayed() -> None:
    # tests/template/test_models_transcripts.py replays the others.
    assert list_steps(PAGE, "here")
    names = ("here", "writer", "tune", "kernel")
    assert PAGE.read_text().count("```console\n") == len(names)
    assert all(list_steps(PAGE, name) for name in names)
