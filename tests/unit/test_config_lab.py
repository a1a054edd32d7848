"""Loading a lab: every problem at once, with its line; what wins over what; hostile files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from labctl.config import LabConfig, clean_name, list_settings, load_lab
from labctl.config.document import MAX_FILE_BYTES
from labctl.config.schema import ProviderTraits
from labctl.errors import ConfigError, Problem, UsageError
from labctl.model import GpuNeed, Value


class Host(Value, frozen=True):
    host: str
    port: int = 22


class StaticSettings(Value, frozen=True):
    hosts: tuple[str | Host, ...]
    user: str = ""
    powered: bool = True


class LocalSettings(Value, frozen=True):
    memory: int = 0


SETTINGS: dict[str, type[Value]] = {"static": StaticSettings, "local": LocalSettings}


def find_provider(name: str) -> ProviderTraits:
    if name not in SETTINGS:
        raise UsageError(f"no provider {name}", why="installed: local, static")
    return ProviderTraits(SETTINGS[name])


class LabHome:
    """A home directory with one lab in it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.root = home / "digits"
        self.root.mkdir()
        self.environ = {"HOME": str(home)}

    def write(self, text: str | bytes) -> Path:
        path = self.root / "lab.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def write_user_file(self, text: str) -> None:
        file = self.home / ".config" / "labctl" / "config.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def load(self, text: str | bytes | None = None, **overrides: str) -> LabConfig:
        if text is not None:
            self.write(text)
        return load_lab(
            self.root, overrides=overrides, environ=self.environ, find_provider=find_provider
        )

    def problems(self, text: str | bytes, **overrides: str) -> list[Problem]:
        with pytest.raises(ConfigError) as caught:
            self.load(text, **overrides)
        assert caught.value.exit_code == 2
        assert caught.value.hint
        found = list(caught.value.problems)
        for each in found:
            assert f"{each.path}{each.message}".isprintable()
        return found

    def only_problem(self, text: str | bytes, **overrides: str) -> Problem:
        (found,) = self.problems(text, **overrides)
        return found


@pytest.fixture
def lab_home(tmp_path: Path) -> LabHome:
    return LabHome(tmp_path)


def test_a_name_is_enough(lab_home: LabHome) -> None:
    lab = lab_home.load("lab: vision\n")
    assert lab.name == "vision"
    assert lab.server.provider == "local"
    assert lab.server.need.gpu == GpuNeed()
    assert lab.server.provider_settings == {"local": LocalSettings()}
    assert lab.image.reference
    assert lab.outputs == ("checkpoints", "logs")
    assert (lab.root, lab.path) == (lab_home.root, lab_home.root / "lab.yaml")


def test_not_even_a_name_is_needed(lab_home: LabHome) -> None:
    assert lab_home.load("# all by default\n").name == "digits"


def test_a_dockerfile_beside_it_is_the_image(lab_home: LabHome) -> None:
    (lab_home.root / "Dockerfile").write_text("FROM scratch\n")
    assert lab_home.load("lab: a").image.build == "."
    assert lab_home.load("image: python:3.12").image.reference == "python:3.12"


def test_a_list_of_packages_is_an_image(lab_home: LabHome) -> None:
    (lab_home.root / "Dockerfile").write_text("FROM scratch\n")
    pip = lab_home.load('image: {python: "3.10", requirements: deps/requirements.txt}').image
    assert (pip.python, pip.environment_file, pip.build) == ("3.10", "deps/requirements.txt", "")
    assert lab_home.load("image: {requirements: pyproject.toml}").image.python == "3.12"
    lab_home.write_user_file("base_image: debian:12\n")
    assert lab_home.load("image: {requirements: pyproject.toml}").image.python == ""
    both = 'image: {python: "3.10", requirements: pyproject.toml}'
    assert lab_home.load(both).image.python == "3.10"
    conda = lab_home.load("image: {conda: environment.yml}").image
    assert (conda.python, conda.environment_file, conda.is_built) == ("", "environment.yml", True)


def test_a_directory_whose_name_will_not_do(lab_home: LabHome) -> None:
    lab_home.root = lab_home.root.rename(lab_home.home / "My Project")
    found = lab_home.only_problem("run: a")
    assert found.path == "lab"
    assert "`lab: my-project`" in found.message
    assert lab_home.load("lab: fine").name == "fine"


def test_everything_wrong_is_told_at_once_in_the_order_of_its_lines(lab_home: LabHome) -> None:
    found = lab_home.problems(
        "lab: Digits\n"
        "serwer: {}\n"
        "server:\n"
        "  provider: static\n"
        "  gpu: T4:0\n"
        "  max_price: 1:30\n"
        "  spot: nevr\n"
        "  ttl: 8\n"
        "  gpu: T4\n"
        "  static: {hosts: [a, {host: b, prot: 3}], user: [x]}\n"
        "gpu: T4\n"
        "env: [SEED]\n"
        "limits: {memory: 8G, cpus: many}\n"
        "outputs: [/etc, ../up, checkpoints]\n"
        "image: Not An Image\n"
        "services: {api: {}, jupyter: {port: 70000}}\n"
    )
    assert [(each.line, each.path) for each in found] == [
        (1, "lab"),
        (2, "serwer"),
        (5, "server.gpu"),
        (6, "server.max_price"),
        (7, "server.spot"),
        (8, "server.ttl"),
        (9, "server.gpu"),
        (10, "server.static.hosts[1].prot"),
        (10, "server.static.user"),
        (11, "gpu"),
        (12, "env"),
        (13, "limits.memory"),
        (13, "limits.cpus"),
        (14, "outputs[0]"),
        (14, "outputs[1]"),
        (15, "image"),
        (16, "services.jupyter.port"),
        (16, "services.api"),
    ]
    said = {each.path: each.message for each in found}
    assert "did you mean server?" in said["serwer"]
    assert "did you mean never?" in said["server.spot"]
    assert "belongs at server.gpu" in said["gpu"]
    assert "did you mean port?" in said["server.static.hosts[1].prot"]
    assert "expected a mapping, got a list" in said["env"]
    assert "try digits" in said["lab"]


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("lab: a\nlab: b", "lab", "given twice, first on line 1"),
        ("env: {A: 1, A: 2}", "env.A", "given twice"),
        ("env: {A: }", "env.A", 'write ""'),
        ("env: {1A: x}", "env.1A", "variable name"),
        ("env: {LABCTL_RUN_ID: x}", "env.LABCTL_RUN_ID", "reserved for labctl"),
        ("secrets: [AWS_SECRET_ACCESS_KEY]", "secrets[0]", "never leave"),
        ("secrets: WANDB_API_KEY", "secrets", "expected a list"),
        ("secrets: [A, A]", "secrets", "is listed twice"),
        ("env: {A: x}\nsecrets: [A]", "env.A", "also in secrets"),
        ("data: {a: ../up}", "data.a", "is outside the lab"),
        ("data: {a: b/../../c}", "data.a", "is outside the lab"),
        ("data: {a: http://x.org/a}", "data.a", "https://"),
        ("data: {a: file:///etc/passwd}", "data.a", "https://"),
        ("data: {a: 'https://me:pw@x.org/a'}", "data.a", "without a user"),
        ("data: {a: '~root/x'}", "data.a", "is outside the lab"),
        ("data: {a: -rf}", "data.a", "not a path"),
        ("data: {'../a': x}", "data.../a", "is not a valid name"),
        ("data: {a: 's3://B/x'}", "data.a", "bucket"),
        ("data: {a: 'gs://B/x'}", "data.a", "write gs://bucket/folder"),
        ("data: {a: server:datasets}", "data.a", "not a full path"),
        ("data: {a: server:~/datasets}", "data.a", "not a full path"),
        ("data: {a: server:/}", "data.a", "the whole server"),
        ("data: {a: server:/datasets/../etc}", "data.a", "without `..`"),
        ("data: {a: server://datasets}", "data.a", "without `..` and `//`"),
        ("data: {a: server:/root}", "data.a", "/root belongs to the system"),
        ("data: {a: server:/etc/ssl}", "data.a", "/etc belongs to the system"),
        ("data: {a: server:/var/run/docker.sock}", "data.a", "/var belongs to the system"),
        ("data: {a: server:/proc/1/root}", "data.a", "/proc belongs to the system"),
        ("data: {a: server:/opt}", "data.a", "it contains /opt/labctl"),
        ("data: {a: server:/home/ann/.ssh}", "data.a", "hidden directories"),
        ('data: {a: "server:/x\\ty"}', "data.a", "cannot be data"),
        ("outputs: [.]", "outputs[0]", "below /lab/run"),
        ("outputs: [a/../..]", "outputs[0]", "is outside the lab"),
        ("outputs: [a, a]", "outputs", "is listed twice"),
        ("image: {build: ../other}", "image.build", "is outside the lab"),
        ("image: {build: /etc}", "image.build", "is outside the lab"),
        ("image: {conda: a.yml, build: .}", "image", "made from one of them"),
        ("image: {requirements: a.txt, conda: b.yml}", "image", "made from one of them"),
        ("image: {python: '3.12'}", "image", "python goes with requirements"),
        ("image: {requirements: setup.sh}", "image.requirements", "neither a requirements.txt"),
        ("image: {requirements: ../r.txt}", "image.requirements", "is outside the lab"),
        ("image: {requirements: 'my list.txt'}", "image.requirements", "only letters"),
        ("image: {requirements: r.txt, python: '2.7'}", "image.python", "write 3.12"),
        ("image: {conda: env.json}", "image.conda", "not an environment.yml"),
        ("server: {executor: process}\nimage: a:1", "image", "from a list of packages"),
        ("server: {executor: process}\nimage: {build: .}", "image", "from a list of packages"),
        (
            "server: {executor: process}\nimage: {conda: e.yml, registry: r.example/a}",
            "image.registry",
            "needs a container",
        ),
        ("server: {executor: process}\nlimits: {cpus: 2}", "limits.cpus", "all the memory"),
        ("image: {biuld: .}", "image.biuld", "did you mean build?"),
        ("image: '-v'", "image", "not an image"),
        ("image: [a]", "image", "a text or a mapping"),
        ('run: "echo \'open"', "run", "not closed"),
        ("run: {a: b}", "run", "a text or a list"),
        ("services: {api: {}}", "services.api", "needs a port"),
        ("services: {a: {port: 1}, b: {port: 1}}", "services.b", "already used by a"),
        ("services: {jupyter: {port: 0}}", "services.jupyter.port", "1 to 65535"),
        ("store: /tmp/x", "store", "s3://bucket"),
        ("store: s3://bucket/a/../b", "store", "`..`"),
        ("limits: {memory: 1MB}", "limits", "at least 6MiB"),
        ("limits: {cpus: .nan}", "limits.cpus", "number of CPUs"),
        ("base_image: debian", "base_image", "LABCTL_BASE_IMAGE"),
        ("server: {static: {}}", "server.static.hosts", "is required"),
        (
            "server: {static: {hosts: [a], powered: maybe}}",
            "server.static.powered",
            "true or false",
        ),
        ("server: {static: {hosts: [{host: a, port: x}]}}", "server.static.hosts[0].port", "whole"),
        ("server: {provider: azure}", "server.provider", "installed: local, static"),
        ("server: {statik: {hosts: [a]}}", "server.statik", "unknown key"),
        ("server: local", "server", "expected a mapping"),
        ("server: {ttl: 1:30}", "server.ttl", "1h30m"),
        ("server: {ttl: 0s}", "server.ttl", "out of range"),
        ("server: {budget: 0}", "server.budget", "price"),
    ],
)
def test_one_wrong_thing(lab_home: LabHome, text: str, path: str, words: str) -> None:
    found = lab_home.only_problem(text)
    assert found.path == path
    assert found.line == text.count("\n") + 1 or "env: {A: x}" in text
    assert words in found.message


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("lab: a\n\tb: 1", 2, "indent with spaces"),
        ("lab: [a", 1, "not valid YAML"),
        ("lab: a\n---\nlab: b", 2, "second document"),
        ("- a", 1, "must be a mapping"),
        ("just words", 1, "must be a mapping"),
        ("lab: " + "[" * 50 + "]" * 50, 1, "nested deeper"),
        ("lab: \x1b[2J", 1, r"'\x1b'"),
        ("lab: a\nrun: \x00", 2, r"'\x00'"),
        ("a: b: c", 1, "not valid YAML"),
        ('lab: "a\\qb"', 1, "not valid YAML"),
        (b"lab: a\nrun: caf\xe9\n", 2, "not UTF-8"),
        ("lab: a".encode("utf-16"), 1, "UTF-16"),
        ("lab: a".encode("utf-32-le"), 1, "UTF-16 or UTF-32"),
    ],
)
def test_what_is_not_even_a_file_of_keys(
    lab_home: LabHome, text: str | bytes, line: int, words: str
) -> None:
    found = lab_home.only_problem(text)
    assert found.line == line
    assert words in found.message


def test_bombs_of_aliases_are_refused(lab_home: LabHome) -> None:
    bomb = "a: &a [x,x,x]\n" + "".join(
        f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
    found = lab_home.problems(bomb)
    assert any("anchors" in each.message for each in found)
    assert any("aliases" in each.message for each in found)


def test_merge_keys_are_unknown_keys(lab_home: LabHome) -> None:
    assert lab_home.only_problem("<<: {lab: a}").path == "<<"


@pytest.mark.parametrize(
    "text",
    [
        "lab: !!python/object/apply:os.system ['touch pwned']",
        "lab: !!binary aGk=",
        "lab: !custom x",
        "!!map {lab: a}",
    ],
)
def test_tags_are_refused_and_never_run(lab_home: LabHome, text: str) -> None:
    assert any("tags" in each.message for each in lab_home.problems(text))
    assert not (lab_home.root / "pwned").exists()


def test_control_characters_behind_escapes_are_found_and_escaped(lab_home: LabHome) -> None:
    found = lab_home.problems('env: {A: "\\x1b[2J", "B\\u202e": x, "C\\0": y}\n')
    assert {each.path for each in found} >= {"env.A", r"env.C\x00"}


def test_a_file_of_any_size_is_not_read(lab_home: LabHome) -> None:
    lab_home.write(b"# " + b"x" * MAX_FILE_BYTES)
    with pytest.raises(ConfigError, match="too large"):
        lab_home.load()


def test_a_lab_yaml_that_is_a_device_or_a_pipe_is_not_read(lab_home: LabHome) -> None:
    (lab_home.root / "lab.yaml").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="not a file"):
        lab_home.load()


@pytest.mark.parametrize(
    ("called", "name"),
    [("digits", "digits"), ("My Lab!", "my-lab"), ("NULL", "null"), ("12", "12")],
)
def test_what_needs_no_lab_is_read_in_any_directory(
    lab_home: LabHome, called: str, name: str
) -> None:
    elsewhere = lab_home.home / called
    elsewhere.mkdir(exist_ok=True)
    config = load_lab(elsewhere, environ=lab_home.environ, needs_file=False)
    assert (config.name, config.server.provider) == (name, "local")
    with pytest.raises(ConfigError, match="there is no lab"):
        load_lab(elsewhere, environ=lab_home.environ)


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf", b"  \r\n"])
def test_an_empty_file_says_what_to_do(lab_home: LabHome, data: bytes) -> None:
    with pytest.raises(ConfigError, match="is empty") as caught:
        lab_home.load(data)
    name = clean_name(lab_home.root.name)
    assert caught.value.hint == f"echo 'lab: {name}' > {lab_home.root / 'lab.yaml'}"


def test_a_missing_file_says_what_to_do(lab_home: LabHome) -> None:
    with pytest.raises(ConfigError, match=r"no lab\.yaml") as caught:
        lab_home.load()
    assert caught.value.hint.startswith("labctl init digits")


def test_below_a_lab_the_hint_names_the_lab(lab_home: LabHome) -> None:
    lab_home.write("lab: a")
    inner = lab_home.root / "src" / "deep"
    inner.mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        load_lab(inner, environ=lab_home.environ)
    assert caught.value.hint == f"labctl -C {lab_home.root} ..."


def test_a_byte_order_mark_and_windows_lines_are_fine(lab_home: LabHome) -> None:
    assert lab_home.load(b"\xef\xbb\xbflab: a\r\nrun: python a.py\r\n").run == ("python", "a.py")


def test_scalars_stay_what_was_typed(lab_home: LabHome) -> None:
    lab = lab_home.load(
        "env: {A: 1:30, B: no, C: 010, D: 1.0, E: 2020-01-01, F: '', G: null_}\nlab: 123"
    )
    assert lab.env == {
        "A": "1:30",
        "B": "no",
        "C": "010",
        "D": "1.0",
        "E": "2020-01-01",
        "F": "",
        "G": "null_",
    }
    assert lab.name == "123"


def test_keys_with_nothing_after_them_count_as_left_out(lab_home: LabHome) -> None:
    lab = lab_home.load("lab:\nserver:\n  gpu:\nenv:\nsecrets:\nservices:\n  jupyter:\nlimits:\n")
    assert lab.name == "digits"
    assert lab.services["jupyter"].port == 8888


def test_sources_of_data(lab_home: LabHome) -> None:
    lab = lab_home.load(
        "data: {a: ./set, b: /srv/b/, c: ~/c, d: 'https://x.org/d.zip', e: 's3://bucket/e/'}"
    )
    assert lab.data["a"].path == lab_home.root / "set"
    assert lab.data["a"].inside_lab
    assert lab.data["b"].path == Path("/srv/b")
    assert not lab.data["b"].inside_lab
    assert lab.data["c"].path == lab_home.home / "c"
    assert lab.data["d"].url == "https://x.org/d.zip"
    assert lab.data["e"].url == "s3://bucket/e"


def test_data_that_is_already_on_the_server(lab_home: LabHome) -> None:
    lab = lab_home.load("data: {birds: server:/datasets/birds/, 'a': ./set, b: server:/home/ann/b}")
    assert lab.server_data == {"birds": "/datasets/birds", "b": "/home/ann/b"}
    birds = lab.data["birds"]
    assert (birds.path, birds.url, birds.written) == (None, "", "server:/datasets/birds")


def test_flags_win_over_environment_over_lab_over_user_file_over_default(lab_home: LabHome) -> None:
    user = "server: {gpu: any, ttl: 1h, idle: 1m, spot: only, max_price: 9}\nstore: s3://mine/x\n"
    lab_home.write_user_file(user)
    lab_home.environ |= {"LABCTL_GPU": "T4", "LABCTL_TTL": "3h", "LABCTL_IDLE": ""}
    lab = lab_home.load("server:\n  gpu: none\n  ttl: 2h\n  idle: 2m\n", gpu="A100:2")
    need = lab.server.need
    assert need.gpu == GpuNeed(kind="A100", count=2)
    assert (need.ttl_s, need.idle_s, need.spot, need.budget_usd) == (10_800, 120, "only", None)
    shown = {key: (value, origin) for key, value, origin in list_settings(lab)}
    assert shown["server.gpu"] == ("A100:2", "--gpu")
    assert shown["server.ttl"] == ("3h", "LABCTL_TTL")
    assert shown["server.idle"] == ("2m", "lab.yaml:4")
    assert shown["server.spot"] == ("only", "~/.config/labctl/config.yaml:1")
    assert shown["server.budget"] == ("", "default")
    assert shown["store"] == ("s3://mine/x", "~/.config/labctl/config.yaml:2")


def test_flags_may_be_dotted_keys(lab_home: LabHome) -> None:
    lab = lab_home.load("lab: a", **{"limits.memory": "1GB", "name": "other"})
    assert lab.limits.memory_bytes == 10**9
    assert lab.name == "other"


def test_a_wrong_switch_is_named(lab_home: LabHome) -> None:
    lab_home.environ["LABCTL_TTL"] = "8"
    lab_home.write_user_file("server:\n  gpuu: T4\nlab: a\n")
    found = {each.path: each for each in lab_home.problems("lab: a\n", gpu="T4:x")}
    assert "(from LABCTL_TTL)" in found["server.ttl"].message
    assert "(from --gpu)" in found["server.gpu"].message
    assert "did you mean gpu? (from ~/.config/labctl/config.yaml:2)" in found["server.gpuu"].message
    assert "(from ~/.config/labctl/config.yaml:3)" in found["lab"].message
    assert {each.line for each in found.values()} == {0}


def test_a_wrong_switch_is_not_blamed_on_lab_yaml(lab_home: LabHome) -> None:
    lab_home.write("lab: a\n")

    def fail(**overrides: str) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            load_lab(lab_home.root, environ=lab_home.environ, overrides=overrides)
        return caught.value

    assert fail(gpu="T4:x").what == "--gpu is not valid"
    both = fail(ttl="8", gpu_memory="x")
    assert both.what == "--ttl and --min-gpu-memory are not valid"
    assert both.hint == "labctl up --help   # describes --ttl, --min-gpu-memory"
    lab_home.environ["LABCTL_TTL"] = "8"
    assert (fail().what, fail().hint) == ("LABCTL_TTL is not valid", "unset LABCTL_TTL")
    lab_home.write("lab: a\nrum: x\n")
    assert fail().what.endswith("lab.yaml has 2 problems")


def test_switches_of_the_machine(lab_home: LabHome) -> None:
    lab_home.write_user_file("wheelhouse: ~/wheels\nbase_image: debian:12\n")
    lab_home.environ["LABCTL_PACKAGE_INDEX"] = "https://me:pw@index.example/simple"
    lab_home.environ["LABCTL_BASE_IMAGE"] = "mirror.example:5000/debian:12"
    lab_home.environ["LABCTL_CACHE_POOL"] = "ann"
    lab = lab_home.load("lab: a")
    assert lab.wheelhouse == str(lab_home.home / "wheels")
    assert lab.base_image == "mirror.example:5000/debian:12"
    assert lab.package_index == "https://me:pw@index.example/simple"
    assert lab.cache_pool == "ann"
    assert "pw@" not in str(list_settings(lab))


def test_provider_settings_are_typed(lab_home: LabHome) -> None:
    lab = lab_home.load("server: {provider: static, static: {hosts: [a, {host: b, port: 2222}]}}")
    assert lab.server.provider_settings["static"] == StaticSettings(
        hosts=("a", Host(host="b", port=2222))
    )


def test_without_types_the_sections_stay_plain(lab_home: LabHome) -> None:
    lab_home.write("server: {provider: static, static: {hosts: [a]}}")
    lab = load_lab(lab_home.root, environ=lab_home.environ)
    assert lab.server.provider_settings == {"static": {"hosts": ["a"]}}


def test_values_that_look_secret_are_not_shown(lab_home: LabHome) -> None:
    lab = lab_home.load("env: {HF_TOKEN: hunter2, SEED: 1}\nsecrets: [WANDB_API_KEY]")
    rows = {key: value for key, value, _ in list_settings(lab)}
    assert rows["env.HF_TOKEN"] == "********"
    assert rows["env.SEED"] == "1"
    assert rows["secrets"] == "WANDB_API_KEY"


keys = st.sampled_from(
    ["lab", "server", "gpu", "ttl", "env", "data", "run", "image", "static", "x"]
)
trees = st.recursive(
    st.one_of(st.none(), st.text(max_size=20), st.sampled_from(["T4", "8h", "../x", "\x1b[2J"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(keys, st.text(max_size=8)), inner, max_size=4),
    ),
    max_leaves=12,
)


@given(tree=st.dictionaries(keys, trees, max_size=5))
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_tree_is_read_or_refused(lab_home: LabHome, tree: dict[str, object]) -> None:
    import yaml

    lab_home.write(yaml.safe_dump(tree, allow_unicode=True))
    try:
        lab = lab_home.load()
    except ConfigError as error:
        said = [f"{each.path}{each.message}" for each in error.problems]
    else:
        said = [f"{key}{origin}" for key, _, origin in list_settings(lab)]
    assert all(each.isprintable() for each in said)


@given(data=st.binary(max_size=300))
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_bytes_are_read_or_refused(lab_home: LabHome, data: bytes) -> None:
    lab_home.write(data)
    try:
        lab_home.load()
    except ConfigError as error:
        said = "".join(f"{each.path}{each.message}" for each in error.problems)
    else:
        said = ""
    assert said == "" or said.isprintable()


@pytest.mark.parametrize(
    ("lines", "is_stored"),
    [
        ("image: {build: .}\nstore: s3://bucket/labs", True),
        ("image: {build: ., store: false}\nstore: s3://bucket/labs", False),
        ("image: {build: .}\nstore: ssh://me@store/labs", False),
        ("image: {build: ., store: true}\nstore: ssh://me@store/labs", True),
        ("image: {build: ., store: true}", False),
        ("image: python:3.12\nstore: s3://bucket/labs", False),
    ],
)
def test_a_bucket_gets_built_images_and_an_ssh_server_only_if_lab_yaml_says_so(
    lab_home: LabHome, lines: str, is_stored: bool
) -> None:
    assert lab_home.load(f"lab: vision\n{lines}\n").should_store_images is is_stored
