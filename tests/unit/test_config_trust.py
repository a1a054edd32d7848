"""A stranger's lab.yaml: what is asked, what is kept, and where secrets come from."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path

import pytest

from labctl.config import (
    LabConfig,
    Paths,
    find_paths,
    is_trusted,
    list_secret_names,
    list_trust_questions,
    load_lab,
    read_secret_values,
    require_secret_names,
    set_secret,
    trust,
)
from labctl.config.schema import ProviderTraits
from labctl.errors import LabError, PolicyError, UsageError
from labctl.servers.provider_traits import read_provider_traits
from labctl.shell import Secret

LAB_ID = "0123456789ab"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "digits").mkdir()
    return tmp_path


@pytest.fixture
def places(home: Path) -> Paths:
    return find_paths({"HOME": str(home)})


def load(home: Path, text: str, **overrides: str) -> LabConfig:
    (home / "digits" / "lab.yaml").write_text(text)
    return load_lab(
        home / "digits",
        overrides=overrides,
        environ={"HOME": str(home)},
        find_provider=read_provider_traits,
    )


@pytest.mark.parametrize(
    "text",
    [
        "lab: a",
        "server: {provider: local, gpu: none, ttl: 8h}\nrun: make\ndata: {a: ./set}",
        "data: {a: 'https://example.org/a.zip'}\nservices: {jupyter: {}}",
    ],
)
def test_a_lab_that_touches_nothing_of_yours_needs_no_trust(
    home: Path, places: Paths, text: str
) -> None:
    lab = load(home, text)
    assert list_trust_questions(lab) == []
    assert is_trusted(places, lab)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("secrets: [A, B]", "give your A, B to"),
        ("store: s3://bucket/labs", "copy results to s3://bucket/labs"),
        (
            "store: s3://bucket/labs\nimage: {build: .}",
            "copy results, and the image that it builds with its build arguments, "
            "to s3://bucket/labs",
        ),
        ("data: {keys: ~/.ssh}", "/.ssh to the server"),
        ("data: {all: /}", "send / to the server"),
        ("data: {a: server:/datasets/a}", "let its programs read /datasets/a on the server"),
        ("data: {a: 's3://private/x'}", "read s3://private/x"),
        ("server: {provider: static, static: {hosts: [gpu1, gpu2]}}", "hosts gpu1, gpu2"),
        ("server: {provider: aws, gpu: 'H100:8', max_price: 90}", "gpu H100:8; max_price 90"),
        ("server: {provider: aws}", "a server from aws, a shared or paid machine"),
        ("server: {local: {image: evil}}", "image evil"),
    ],
)
def test_what_it_would_do_is_asked(home: Path, places: Paths, text: str, words: str) -> None:
    lab = load(home, text)
    (question,) = list_trust_questions(lab)
    assert words in question
    assert question.isprintable()
    assert not is_trusted(places, lab)


def test_what_you_say_yourself_is_not_asked(home: Path, places: Paths) -> None:
    (places.config_dir).mkdir(parents=True)
    places.config_file.write_text("store: s3://mine/x\nserver: {provider: static}\n")
    assert list_trust_questions(load(home, "lab: a")) == []
    assert list_trust_questions(load(home, "lab: a", provider="aws", store="s3://mine/y")) == []


def test_a_strangers_wishes_at_your_own_provider_are_asked(home: Path, places: Paths) -> None:
    places.config_dir.mkdir(parents=True)
    places.config_file.write_text("server: {provider: aws, budget: 5}\n")
    (question,) = list_trust_questions(load(home, "server: {budget: 500}"))
    assert "budget 500" in question


def test_the_answer_holds_for_this_very_file(home: Path, places: Paths) -> None:
    lab = load(home, "secrets: [A]")
    trust(places, lab)
    assert is_trusted(places, lab)
    file = places.config_dir / "trust.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(places.config_dir.stat().st_mode) == 0o700
    changed = load(home, "secrets: [A, B]")
    assert not is_trusted(places, changed)
    trust(places, changed)
    assert is_trusted(places, changed)
    assert is_trusted(places, lab)


def test_an_answer_from_before_images_were_stored_does_not_cover_them(
    home: Path, places: Paths
) -> None:
    text = "store: s3://bucket/labs\n"
    only_results, with_image = load(home, text), load(home, f"{text}image: {{build: .}}\n")
    answers = {
        hashlib.sha256(lab.content).hexdigest(): {"lab": "x", "at": 1}
        for lab in (only_results, with_image)
    }
    places.config_dir.mkdir(parents=True)
    (places.config_dir / "trust.json").write_text(json.dumps(answers))
    (places.config_dir / "trust.json").chmod(0o600)
    assert is_trusted(places, only_results)
    assert not is_trusted(places, with_image)
    trust(places, with_image)
    assert is_trusted(places, with_image)


def test_an_answer_covers_images_only_if_they_were_in_the_question(
    home: Path, places: Paths
) -> None:
    text = "store: s3://bucket/labs\nimage: {build: .}\n"
    results = load(home, text, **{"image.store": "false"})
    assert "image" not in list_trust_questions(results)[0]
    trust(places, results)
    assert is_trusted(places, results)
    assert not is_trusted(places, load(home, text))


def test_a_broken_trust_file_counts_as_never_answered(home: Path, places: Paths) -> None:
    lab = load(home, "secrets: [A]")
    places.config_dir.mkdir(parents=True)
    for text in ("", "{", "[]", '{"x": 1}', "\x00"):
        (places.config_dir / "trust.json").write_text(text)
        assert not is_trusted(places, lab)
    trust(places, lab)
    assert is_trusted(places, lab)


def test_secrets_come_from_the_file_then_the_environment(home: Path, places: Paths) -> None:
    lab = load(home, "secrets: [A, B]")
    trust(places, lab)
    set_secret(places, LAB_ID, "A", "from-file")
    values = read_secret_values(places, LAB_ID, lab, {"A": "from-env", "B": "b", "C": "c"})
    assert {name: value.reveal() for name, value in values.items()} == {"A": "from-file", "B": "b"}
    assert "from-file" not in repr(values)
    assert list_secret_names(places, LAB_ID) == ["A"]


def test_nothing_is_given_to_a_lab_that_was_not_approved(home: Path, places: Paths) -> None:
    lab = load(home, "secrets: [A]")
    set_secret(places, LAB_ID, "A", "x")
    with pytest.raises(PolicyError) as caught:
        read_secret_values(places, LAB_ID, lab, {"A": "y"})
    assert caught.value.hint == "labctl trust"
    assert caught.value.exit_code == 3


def test_a_missing_value_names_the_command(home: Path, places: Paths) -> None:
    lab = load(home, "secrets: [A, B]")
    trust(places, lab)
    with pytest.raises(LabError, match="no value for B") as caught:
        read_secret_values(places, LAB_ID, lab, {"A": "x", "B": ""})
    assert caught.value.hint == "labctl secret set B"


def test_a_missing_value_is_noticed_before_the_approval(home: Path, places: Paths) -> None:
    lab = load(home, "secrets: [A, B]")
    set_secret(places, LAB_ID, "A", "x")
    require_secret_names(places, LAB_ID, lab, {"B": "y"})
    with pytest.raises(LabError, match="no value for B"):
        require_secret_names(places, LAB_ID, lab, {"B": ""})


def test_labs_do_not_see_each_others_secrets(home: Path, places: Paths) -> None:
    set_secret(places, LAB_ID, "A", "x")
    lab = load(home, "secrets: [A]")
    trust(places, lab)
    with pytest.raises(LabError, match="no value"):
        read_secret_values(places, "ba9876543210", lab, {})


def test_the_secrets_file_is_private_and_refused_when_it_is_not(home: Path, places: Paths) -> None:
    set_secret(places, LAB_ID, "A", Secret("hunter2"))
    file = places.config_dir / "secrets" / f"{LAB_ID}.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    for mode in (0o640, 0o604, 0o644, 0o601):
        file.chmod(mode)
        with pytest.raises(PolicyError) as caught:
            list_secret_names(places, LAB_ID)
        assert caught.value.hint == f"chmod 600 {file}"
        assert "hunter2" not in f"{caught.value}{caught.value.why}"


def test_a_damaged_secrets_file_is_told_without_its_content(home: Path, places: Paths) -> None:
    set_secret(places, LAB_ID, "A", "hunter2")
    file = places.config_dir / "secrets" / f"{LAB_ID}.json"
    file.write_text('{"A": ["hunter2"]}')
    with pytest.raises(LabError, match="damaged") as caught:
        list_secret_names(places, LAB_ID)
    assert "hunter2" not in f"{caught.value}{caught.value.why}{caught.value.hint}"


def test_an_empty_value_replaces_nothing(places: Paths) -> None:
    set_secret(places, LAB_ID, "A", "x")
    with pytest.raises(UsageError, match="the value of A is empty"):
        set_secret(places, LAB_ID, "A", "")
    assert list_secret_names(places, LAB_ID) == ["A"]


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "1A", "A B", "", "LABCTL_X"])
def test_names_that_no_secret_may_have(places: Paths, name: str) -> None:
    with pytest.raises(UsageError):
        set_secret(places, LAB_ID, name, "x")


@pytest.mark.parametrize("lab_id", ["../../x", "", "a/b", "A"])
def test_a_lab_id_never_leads_out_of_the_directory(places: Paths, lab_id: str) -> None:
    with pytest.raises(ValueError, match="not the id of a lab or course"):
        set_secret(places, lab_id, "A", "x")


def test_machines_written_as_mappings_are_named_too(home: Path) -> None:
    from labctl.providers.static import StaticSettings

    machine = "{host: 10.0.0.7, jump: eve@gate.example}"
    text = f"server: {{provider: static, static: {{hosts: [gpu1, {machine}]}}}}\n"
    (home / "digits" / "lab.yaml").write_text(text)
    lab = load_lab(
        home / "digits",
        environ={"HOME": str(home)},
        find_provider=lambda name: ProviderTraits(StaticSettings),
    )
    (question,) = list_trust_questions(lab)
    assert all(said in question for said in ("gpu1", "10.0.0.7", "eve@gate.example"))
    assert "identity" not in question
