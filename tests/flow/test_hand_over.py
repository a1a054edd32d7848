"""A lab goes to a keeper, whole or not at all, and comes back with what happened meanwhile."""

from __future__ import annotations

import hashlib
import io
import stat
import tarfile
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from keeper_context import HOST, NAME, Pair, cut, handed_to, pair
from lab_world import LAB_ID, Recorded, World, world

from labctl.config import LAB_FILE, ensure_lab_id, set_secret, trust
from labctl.errors import BusyError, LabError, NotFoundError, PolicyError, TransferError, UsageError
from labctl.errors.replies import decode_reply
from labctl.lifecycle import keeper_host, kept_labs, reconcile, recover, restore, spending_policy
from labctl.lifecycle.down import down
from labctl.lifecycle.keeper_host import KeeperHost
from labctl.lifecycle.lab_archive import LabExport, LabExportReader, labctl_version, write_export
from labctl.lifecycle.status import read_status
from labctl.model import Endpoint, GpuNeed, Need, Offer, Run
from labctl.runs.stored_images import BUILT_EVENT
from labctl.servers import cost, guard
from labctl.servers.chosen_need import choose_need, note_need
from labctl.state import ledgers
from labctl.stores import write_verified
from labctl.transports import Result
from labctl.transports.fake import FakeTransport
from labctl.wire.codec import encode, to_json
from labctl.wire.kept_labs import IMPORT_LAB, SEND_RUN
from labctl.wire.mirrors import StoredCode, StoredRunRecord
from labctl.wire.runs import RunRecord, RunSpec
from labctl.wire.watchdog import GuardLimits

LAB_YAML = """\
lab: digits
run: [python, train.py]
secrets: [TOKEN]
data: {inside: ./set, outside: DIRECTORY}
"""


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    lab = world(tmp_path)
    root = lab.home / "lab"
    (root / "set").mkdir()
    (root / "set" / "one.txt").write_text("inside")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "two.txt").write_text("outside")
    (root / "lab.yaml").write_text(LAB_YAML.replace("DIRECTORY", str(tmp_path / "elsewhere")))
    (root / "train.py").write_text("print('trains')\n")
    (root / ".labctl").mkdir()
    (root / ".labctl" / "lab.json").write_text(f'{{"id": "{LAB_ID}"}}')
    set_secret(lab.places, LAB_ID, "TOKEN", "shown-nowhere")
    trust(lab.places, lab.context().config)
    lab.cloud.price = 0.5
    return pair(lab, tmp_path / "keeper", monkeypatch)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def holders(top: Path, text: str) -> list[str]:
    return [p.name for p in top.rglob("*") if p.is_file() and text.encode() in p.read_bytes()]


# Going


def test_everything_that_a_recovery_needs_is_there_and_nothing_lies_open(two: Pair) -> None:
    assert two.hand_over().name == NAME
    root = two.ward
    assert ensure_lab_id(root) == LAB_ID
    assert (root / ".labctl/kept/night/code/train.py").read_text() == "print('trains')\n"
    assert (root / ".labctl/kept/night/spec.json").is_file()
    context = two.kept()
    paths = {name: source.path for name, source in context.config.data.items()}
    assert paths == {"inside": root / "set", "outside": root / ".labctl/data/outside"}
    assert (root / ".labctl/data/outside/two.txt").read_text() == "outside"
    assert context.identity.read_bytes() == two.lab.context().identity.read_bytes()
    assert mode(context.identity) == 0o600
    assert mode(root) == 0o700
    secrets = two.places.config_dir / "secrets" / f"{LAB_ID}.json"
    assert mode(secrets) == 0o600
    assert holders(two.home, "shown-nowhere") == [secrets.name]
    assert context.get_server().id == two.server().id
    assert [run.id for run in context.state.list_runs(LAB_ID)] == ["night"]
    assert handed_to(two.lab) == HOST


def test_the_keeper_counts_with_what_was_spent_and_with_a_price_like_the_last(two: Pair) -> None:
    state = two.lab.context().state
    old = {"created_at": time.time() - 7200, "price_usd_per_hour": 1.0, "lab": "digits"}
    state.record("created", lab_id=LAB_ID, server_id="srv-old", detail=old)
    state.record("terminated", lab_id=LAB_ID, server_id="srv-old")
    two.hand_over()
    one = kept_labs.find_kept_lab(two.places, NAME)
    assert one.spent_usd == pytest.approx(2.0, abs=0.01)
    now = time.time()
    assert cost.spent_usd(two.state, LAB_ID, now) == pytest.approx(2.0, abs=0.01)
    assert two.kept().config.server.need.max_price_usd_per_hour == pytest.approx(0.5 * 1.25)


def test_handed_over_again_only_what_is_new_travels_and_earlier_runs_stay(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.hand_over()
    (two.ward / "runs" / "night").mkdir(parents=True)
    (two.ward / "runs" / "night" / "model").write_text("mirrored")
    two.started("day")
    sent: list[list[str]] = []
    add = keeper_host.KeeperHost.add

    def counted(self: KeeperHost, parcel: memoryview) -> object:
        with tarfile.open(fileobj=io.BytesIO(bytes(parcel))) as tar:
            sent.append(tar.getnames())
        return add(self, parcel)

    monkeypatch.setattr(keeper_host.KeeperHost, "add", counted)
    assert two.hand_over("day").runs == ("night", "day")
    (names,) = sent
    assert not [name for name in names if "set/" in name or "/data/" in name]
    assert "files/.labctl/kept/day/code/train.py" in names
    assert (two.ward / "runs/night/model").read_text() == "mirrored"
    assert (two.ward / ".labctl/kept/night/code/train.py").is_file()
    assert (two.ward / "set/one.txt").read_text() == "inside"


def test_where_no_keeper_runs_that_and_the_command_are_said(two: Pair) -> None:
    reporter = Recorded()
    assert not two.hand_over(reporter=reporter).running
    assert f"labctl keep is not running on {HOST}" in reporter.said
    assert "labctl keep --install" in reporter.said


def left_at_the_keeper(two: Pair) -> list[str]:
    keep = two.places.keep_dir
    found = [path.name for path in keep.iterdir()] if keep.exists() else []
    keys = [path.name for path in two.places.keys_dir.glob("*")]
    return [name for name in [*found, *keys] if name != ".locks"]


def test_a_server_that_the_keeper_cannot_find_is_not_half_handed_over(two: Pair) -> None:
    shown = two.cloud.machines.copy()
    two.cloud.machines.clear()
    with pytest.raises(NotFoundError, match=f"the keeper at {HOST} cannot keep this lab") as caught:
        two.hand_over()
    assert "another account or region" in caught.value.why
    assert caught.value.hint.startswith(f"on {HOST}:\n")
    assert left_at_the_keeper(two) == []
    assert two.state.list_servers() == []
    assert two.state.list_events() == []
    assert handed_to(two.lab) == ""
    two.cloud.machines.update(shown)
    two.hand_over()
    assert handed_to(two.lab) == HOST


def test_a_server_that_lets_nobody_in_from_there_is_said(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labctl.lifecycle.import_lab.LOGIN_S", 0.1)
    two.lab.machine.error = cut()
    with pytest.raises(BusyError, match="cannot be reached from here"):
        two.hand_over()
    assert left_at_the_keeper(two) == []


def test_a_failed_update_leaves_the_earlier_hand_over_as_it_was(two: Pair) -> None:
    two.hand_over()
    before = (two.ward / "keep.json").read_bytes()
    two.started("day")
    shown = two.cloud.machines.copy()
    two.cloud.machines.clear()
    with pytest.raises(NotFoundError):
        two.hand_over("day")
    two.cloud.machines.update(shown)
    assert (two.ward / "keep.json").read_bytes() == before
    assert left_at_the_keeper(two).count(NAME) == 1


def test_a_server_of_this_machine_alone_goes_to_no_other(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_host.KeeperHost, "endpoint", Endpoint(host="192.0.2.7"))
    with pytest.raises(UsageError, match="cannot keep digits") as caught:
        two.hand_over()
    assert "works only on this machine" in caught.value.why
    assert two.said == []


def test_a_machine_without_labctl_or_with_another_says_how_to_get_it(two: Pair) -> None:
    context = two.lab.context()
    keeper = KeeperHost(context, "alice@login.example:2222")
    with pytest.raises(LabError, match="labctl is not installed on") as caught:
        keeper._parse_reply(IMPORT_LAB, 97, b"", "")
    assert caught.value.hint.startswith('ssh -p 2222 alice@login.example "pipx install')
    assert f"=={labctl_version()}" in caught.value.hint
    with pytest.raises(UsageError, match="is another version, this one is") as caught:
        keeper._parse_reply(IMPORT_LAB, 2, b"", "Error: What is keep?")
    assert caught.value.why.endswith("Error: What is keep?")


STRANGE_REPLIES = [
    "", "null", "[]", "{}", "[" * 100_000, '{"error": "no"}',
    '{"known": null}', '{"known": {"version": 1, "host": "login", "running": true}}',
    '{"told": [], "taken": {"name": "a", "runs": [1], "running": true}, "files": []}',
    '{"told": {"lines": [{"ledger": "1", "number": "2", "at": 1, "kind": "gone"}]}}',
    '{"told": {"runs": [{"id": "a", "lab_id": "b", "server_id": "c", "state": "happy"}]}}',
    '{"told": {"round": {"at": "now", "state": "well"}}}',
    '{"files": {"model.pt": ["large", "00"]}}', '{"files": {"model.pt": [1]}}',
    '{"files": {"model.pt": null}}', '{"dropped": 5}',
]  # fmt: skip


def test_a_reply_of_another_shape_is_an_error_with_what_to_type(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = KeeperHost(two.lab.context(), HOST)
    for reply in STRANGE_REPLIES:
        transport = FakeTransport().reply(
            "labctl keep", Result(code=0, stdout=f"{reply}\n", stderr="working\n")
        )
        monkeypatch.setattr(KeeperHost, "_transport", transport)
        for request in (
            keeper.fetch_inventory,
            lambda: keeper.add(memoryview(b"")),
            keeper.fetch_report,
            lambda: keeper.pull_copy("night", {}, None),
            keeper.drop,
        ):
            with pytest.raises(LabError, match="did not reply as a keeper") as caught:
                request()
            assert caught.value.why not in ("", "working")
            assert "labctl keep --list" in caught.value.hint


def test_a_list_of_files_of_another_shape_is_refused(two: Pair) -> None:
    two.hand_over()
    line = f"exec labctl keep --give {NAME} night"
    for text in ("[]", "5", "{", '{"model.pt": 5}', "[" * 100_000):
        sent = two.transport().run(line, stdin=text.encode() + b"\n", check=False)
        assert sent.code == 2
        with pytest.raises(UsageError, match="not a list of files"):
            decode_reply(SEND_RUN.reply, sent.stdout)


def test_what_was_not_announced_or_leaves_the_directory_is_refused(tmp_path: Path) -> None:
    ward = kept_labs.KeptLab(
        lab="digits",
        lab_id=LAB_ID,
        by="a@b",
        at=0.0,
        runs=(),
        files={"one": (3, "0" * 64)},
    )
    offer = Offer(provider="cloud", type="small")
    lab = world(tmp_path)
    server = lab.cloud.add("srv-1", "digits", LAB_ID, offer)
    parcel = LabExport(version=labctl_version(), kept_lab=ward, server=server)
    (tmp_path / "one").write_text("two")
    stream = io.BytesIO()
    write_export(stream, parcel, {"one": tmp_path / "one"})
    stream.seek(0)
    with pytest.raises(TransferError, match="one changed"):
        LabExportReader(stream).extract_files(tmp_path)
    for name, kind in (("files/../../out", PolicyError), ("files/two", TransferError)):
        whole = io.BytesIO()
        write_export(whole, parcel, {})
        body = whole.getvalue().rstrip(b"\0")
        stream = io.BytesIO()
        stream.write(body + b"\0" * (-len(body) % 512))
        with tarfile.open(fileobj=stream, mode="w|") as tar:
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
        stream.seek(0)
        with pytest.raises(kind):
            LabExportReader(stream).extract_files(tmp_path)
    with pytest.raises(TransferError, match="not an exported lab"):
        LabExportReader(io.BytesIO(b"nonsense"))


# Coming back


def test_what_the_keeper_did_is_known_at_home_exactly_once(two: Pair) -> None:
    two.hand_over()
    two.cloud.settle_s = 0.0
    keeper = two.state
    first = two.server().id
    keeper.record("gone", lab_id=LAB_ID, server_id=first)
    made = two.cloud.add("srv-2", "digits", LAB_ID, Offer(provider="cloud", type="small"))
    del two.cloud.machines[first]
    cost.record_start(keeper, made, "created")
    keeper.record("ready", lab_id=LAB_ID, server_id="srv-2")
    keeper.record("recovered", lab_id=LAB_ID, server_id="srv-2", run_id="night", detail={"step": 7})
    before = keeper.get_run(LAB_ID, "night")
    assert before is not None
    keeper.save_run(msgspec.structs.replace(before, server_id="srv-2", seen_at=time.time()))
    for _ in range(3):
        said = read_status(two.lab.context(), refresh=True)
        assert said.server.id == "srv-2"
        assert said.keeper == HOST
    state = two.lab.context().state
    assert len(state.list_events(lab_id=LAB_ID, kind="recovered")) == 1
    assert len(state.list_events(server_id="srv-2", kind="created")) == 1
    lives = cost.list_server_costs(state, LAB_ID, time.time())
    assert [one.server_id for one in lives] == [first, "srv-2"]
    assert [one.running for one in lives] == [False, True]
    # And back again: the keeper learns nothing twice either.
    assert ledgers.import_lines(two.state, LAB_ID, ledgers.list_lines(state, LAB_ID)) == 1, (
        "its own: gone"
    )
    assert ledgers.import_lines(two.state, LAB_ID, ledgers.list_lines(state, LAB_ID)) == 0
    assert ledgers.import_lines(state, LAB_ID, ledgers.list_lines(two.state, LAB_ID)) == 0
    known = {(one.ledger, one.number) for one in ledgers.list_lines(state, LAB_ID)}
    assert {(one.ledger, one.number) for one in ledgers.list_lines(two.state, LAB_ID)} == known


def test_a_keeper_cannot_say_which_image_or_which_keeper_this_machine_uses(two: Pair) -> None:
    own = {"image": "labctl/built:1", "id": "sha256:own", "architecture": "amd64"}
    state = two.lab.context().state
    state.record(BUILT_EVENT, lab_id=LAB_ID, detail=own)
    two.hand_over()
    assert two.state.list_events(lab_id=LAB_ID, kind=BUILT_EVENT), "the keeper may use this image"
    two.state.record(BUILT_EVENT, lab_id=LAB_ID, detail={**own, "id": "sha256:theirs"})
    two.state.record("recovered", lab_id=LAB_ID, run_id="night")
    reconcile.merge_keeper_records(two.lab.context())
    assert state.list_events(lab_id=LAB_ID, kind="recovered")
    assert [event.detail for event in state.list_events(lab_id=LAB_ID, kind=BUILT_EVENT)] == [own]
    # An honest keeper sends no such line.
    line = ledgers.LedgerLine(
        ledger="x", number=1, at=1.0, kind=ledgers.HANDED, detail={"keeper": "elsewhere"}
    )
    assert ledgers.import_lines(state, LAB_ID, [line]) == 0
    assert handed_to(two.lab) == HOST


def test_a_keeper_that_cannot_be_reached_is_a_note(two: Pair) -> None:
    two.hand_over()
    two.error = cut()
    reporter = Recorded()
    said = read_status(two.lab.context(reporter), refresh=True)
    assert said.server.id == two.server().id
    assert f"cannot reach the keeper at {HOST}" in reporter.said


def test_a_lab_dropped_at_the_keeper_is_its_owners_again(two: Pair) -> None:
    two.hand_over()
    kept_labs.drop(two.places, two.state, "digits")
    assert left_at_the_keeper(two) == []
    assert holders(two.home, "shown-nowhere") == []
    reporter = Recorded()
    read_status(two.lab.context(reporter), refresh=True)
    assert f"{HOST} no longer keeps digits" in reporter.said
    assert handed_to(two.lab) == ""


def test_down_tells_the_keeper_before_the_server_ends(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.hand_over()
    two.lab.machine.run_with("night", **{"model.pt": "weights"})
    at_the_end: list[list[kept_labs.KeptLab]] = []
    end = two.cloud.terminate

    def terminate(server_id: str) -> None:
        at_the_end.append(kept_labs.list_kept_labs(two.places))
        end(server_id)

    monkeypatch.setattr(two.cloud, "terminate", terminate)
    assert down(two.lab.context(), discard=False).pulled_files == 1
    assert at_the_end == [[]]
    assert two.cloud.machines == {}
    assert handed_to(two.lab) == ""


def test_down_ends_nothing_that_a_keeper_would_replace(two: Pair) -> None:
    two.hand_over()
    two.lab.machine.run_with("night", **{"model.pt": "weights"})
    two.error = cut()
    reporter = Recorded()
    with pytest.raises(PolicyError, match="cannot reach the keeper") as caught:
        down(two.lab.context(reporter), discard=False)
    assert "would replace" in caught.value.why
    assert len(two.cloud.machines) == 1
    assert reporter.asked == [], "what it asks for would not be done"
    reporter = Recorded()
    down(two.lab.context(reporter), discard=True)
    assert two.cloud.machines == {}
    assert "may create another server" in reporter.said


def test_without_a_server_a_pull_brings_the_keepers_copy(two: Pair) -> None:
    two.hand_over()
    copy = two.ward / "runs" / "night"
    for step, text in (("step-1", "weights"), ("step-2", "more")):
        (copy / "checkpoints" / step).mkdir(parents=True)
        (copy / "checkpoints" / step / "model").write_text(text)
        (copy / "checkpoints" / step / "manifest.json").write_text("{}")
    (copy / "logs").mkdir()
    (copy / "logs" / "run.log").write_text("step 1\n")
    two.cloud.machines.clear()
    two.cloud.settle_s = 0.0
    context = two.lab.context()
    reconcile.reconcile(context)
    (pulled,) = reconcile.pull(context, ["night"], everything=False)
    assert pulled.files == 5
    home = two.lab.home / "lab/runs/night"
    assert (home / "checkpoints/step-2/model").read_text() == "more"
    (copy / "logs" / "run.log").write_text("step 1\nstep 2\n")
    (again,) = reconcile.pull(context, ["night"], everything=False)
    assert again.files == 1
    assert reconcile.read_saved_log(context, "night") == b"step 1\nstep 2\n"
    assert not (home / ".labctl-partial").exists()


class Store:
    """A store in memory; `fetch` checks as real ones do."""

    url = "s3://bucket/labs"

    def __init__(self, content: dict[str, bytes]) -> None:
        self.content = content

    def read(self, key: str) -> bytes | None:
        return self.content.get(key)

    def fetch(self, key: str, path: Path, size: int, sha256: str) -> None:
        def write(draft: Path) -> None:
            draft.write_bytes(self.content[key])

        write_verified(path, size, sha256, write)


def in_store(run: str, files: dict[str, bytes], **record: Any) -> dict[str, bytes]:
    """What a server has mirrored of a run."""
    index = {name: [len(text), hashlib.sha256(text).hexdigest()] for name, text in files.items()}
    spec = RunSpec(run, "digits", LAB_ID, command=("x",), image="debian:12", env={})
    about = StoredRunRecord(
        spec,
        StoredCode(size=0, sha256=""),
        record=RunRecord(run, lab_id=LAB_ID, **record),
    )
    return {
        f"runs/{run}/run.json": encode(about).encode(),
        f"runs/{run}/index.json": msgspec.json.encode({"files": index}),
        **{f"runs/{run}/files/{name}": text for name, text in files.items()},
    }


def test_a_run_that_its_server_could_not_inspect_is_unfinished(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server mirrors the state "unknown" while its Docker Engine does not answer."""
    (lab.home / "lab" / "lab.yaml").write_text("lab: digits\nrun: x\nstore: s3://bucket/labs\n")
    context = lab.context()
    content = in_store("night", {}, state="unknown")
    monkeypatch.setattr("labctl.lifecycle.restore.open_lab_store", lambda context: Store(content))
    assert recover.is_unfinished(context, "night")
    recover._require_unfinished(context, "night", restore.read_saved_run(context, "night").run)


def test_without_a_server_a_pull_brings_what_the_store_has_but_no_broken_checkpoint(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lab.home / "lab" / "lab.yaml").write_text("lab: digits\nrun: x\nstore: s3://bucket/labs\n")
    context = lab.context()
    files = {
        f"checkpoints/{step}/{name}": f"{step} {name}".encode()
        for step in ("step-1", "step-2")
        for name in ("model", "manifest.json")
    }
    content = in_store("night", {**files, "logs/run.log": b"step 1\n"}, state="exited", exit_code=0)
    content["runs/night/files/checkpoints/step-2/model"] = b"damaged"
    content["runs/night/files/logs/run.log"] += b"grown since"
    monkeypatch.setattr("labctl.runs.saved_copies.open_lab_store", lambda context: Store(content))
    context.state.save_run(Run(id="night", lab_id=LAB_ID, server_id="srv-old", state="running"))
    (pulled,) = reconcile.pull(context, ["night"], everything=False)
    home = lab.home / "lab/runs/night"
    assert (home / "checkpoints/step-1/model").read_bytes() == b"step-1 model"
    assert not (home / "checkpoints/step-2").exists()
    assert (home / "logs/run.log").read_bytes() == b"step 1\n"
    assert [one.path for one in pulled.skipped] == ["checkpoints/step-2/model"]
    assert not pulled.complete
    known = context.state.get_run(LAB_ID, "night")
    assert known is not None
    assert (known.state, known.exit_code, known.server_id) == ("exited", 0, "srv-old")
    content["runs/night/files/checkpoints/step-2/model"] = b"step-2 model"
    (again,) = reconcile.pull(context, ["night"], everything=False)
    assert (again.files, again.complete) == (2, True)
    with pytest.raises(NotFoundError, match="no copy of day is saved outside the server"):
        reconcile.pull(context, ["day"], everything=False)


def test_a_lab_that_was_never_handed_over_asks_nobody(lab: World) -> None:
    context = lab.context()
    assert reconcile.merge_keeper_records(context) == ""
    assert not reconcile.has_copies(context)
    assert (context.config.root / LAB_FILE).is_file()


def test_the_keepers_next_server_has_what_the_options_of_up_asked_for(two: Pair) -> None:
    """`labctl up --gpu T4 --spot only --ttl 8h --idle 30m`, then `run --recover --keeper HOST`."""
    context = two.lab.context()
    chosen = choose_need(context.config, Need(gpu=GpuNeed(kind="T4"), spot="only"))
    note_need(msgspec.structs.replace(context, config=chosen), two.server())
    given = to_json(GuardLimits(ttl_s=28800.0, idle_s=1800.0))
    limits = {"server_id": two.server().id, "detail": {"limits": given}}
    context.state.record(guard.EVENT, lab_id=LAB_ID, **limits)
    two.hand_over()
    need = spending_policy.make_recovery_context(two.kept(), "night").config.server.need
    assert (need.gpu.kind, need.spot, need.ttl_s, need.idle_s) == ("T4", "only", 28800, 1800)
