"""What `labctl top` draws, at both ends of a terminal's width."""

from __future__ import annotations

import io
import os
import pty
import sys
import termios
import time
from queue import Queue
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from labctl.cli import top
from labctl.cli.keys import read_keys
from labctl.cli.top_history import BARS, KEPT, PLAIN_BARS, History, render_sparkline
from labctl.cli.top_overview import STALE_S, ServerSamples, render_overview
from labctl.cli.top_screen import About, render_server
from labctl.errors import ConnectError
from labctl.insight.top import ContainerMetrics, GpuMetrics, GpuUse, ProcessMetrics, ServerMetrics
from labctl.model import Endpoint, Offer, Server

GIB = 1024**3
OURS, THEIRS = "0f1e2d3c4b5a", "ffffffffffff"
SERVER = Server(
    id="i-1",
    provider="aws",
    lab="digits",
    lab_id=OURS,
    alias="digits",
    endpoint=Endpoint(host="gpu.example"),
    offer=Offer(provider="aws", type="g4dn.12xlarge", zone="us-east-1a", price_usd_per_hour=1.17),
    created_at=1_763_700_000.0 - 720,
    state="running",
)
ABOUT = About(server=SERVER, lab_id=OURS, foot="Ctrl-C closes this view")
T4 = GpuMetrics(
    uuid="GPU-0",
    index="0",
    name="Tesla T4",
    use_percent=87,
    memory_bytes=15 * GIB,
    memory_total_bytes=15 * GIB + GIB // 2,
    power_w=61.2,
    power_limit_w=70,
    temperature_c=84,
    sm_clock_mhz=1100,
    sm_clock_max_mhz=1590,
    throttle=("thermal",),
)
PART = GpuMetrics(
    uuid="MIG-1", index="1:0", parent="GPU-1", name="A100 MIG 1g.5gb", memory_bytes=GIB,
    memory_total_bytes=5 * GIB,
)  # fmt: skip
RUN = ContainerMetrics(
    name="digits-night-1",
    run="night",
    lab="digits",
    lab_id=OURS,
    person="student",
    cpu_cores=3.1,
    cores=4,
    memory_bytes=3 * GIB,
    memory_limit_bytes=8 * GIB,
    gpus=("GPU-0",),
    step=100,
    total_steps=400,
)
OTHER = ContainerMetrics(name="cifar-x-1", run="x", lab="cifar", lab_id=THEIRS, person="bob")
SERVICE = ContainerMetrics(
    name="digits-svc-tensorboard", service="tensorboard", lab_id=OURS, person="me"
)
PROCESS = ProcessMetrics(
    pid=4242,
    person="student",
    command="python train.py --epochs 20 --a-long-option " + "x" * 90,
    name="digits-night-1",
    run="night",
    lab="digits",
    lab_id=OURS,
    cpu_cores=2.9,
    memory_bytes=2 * GIB,
    gpus=(GpuUse(uuid="GPU-0", memory_bytes=14 * GIB),),
)
NOW = ServerMetrics(
    at=1_763_700_000.0,
    cores=48,
    load=3.2,
    cpu_cores=7.25,
    memory_bytes=20 * GIB,
    memory_total_bytes=186 * GIB,
    disk_free_bytes=60 * GIB,
    disk_total_bytes=100 * GIB,
    disk_read_bytes_per_s=900 * 1024 * 1024,
    disk_write_bytes_per_s=1000.0,
    net_in_bytes_per_s=0,
    net_out_bytes_per_s=1023.9 * 1024,
    gpus=(T4, PART),
    runs=(RUN, OTHER, SERVICE),
    processes=(PROCESS, ProcessMetrics(pid=7, person="bob", command="blender", memory_bytes=GIB)),
)


def seen(*samples: ServerMetrics) -> History:
    history = History()
    for one in samples:
        history.add(one)
    return history


def drawn(history: History, width: int, about: About = ABOUT, height: int = 0) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(
        render_server(history, about, width, height)
    )
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 140])
def test_everything_is_said_within_the_width(width: int) -> None:
    text = drawn(seen(NOW, NOW), width)
    assert max(map(len, text.splitlines())) <= width
    for said in (
        "digits  aws g4dn.12xlarge us-east-1a, up 12 min, $1.17/h",
        "7.2 of 48 cores",
        "20.0 of 186 GiB",
        "900 MiB/s read",
        "87%",
        "15.0/15.5 GiB",
        "61/70 W",
        "84 °C",
        "heat",
        "1.0/5.0 GiB",
        "night",
        "student",
        "3.1/4",
        "100/400",
        "cifar/x",
        "tensorboard",
        "4242",
        "14.0 GiB",
        "GPU MEM",
        "python train.py",
        "blender",
        "Ctrl-C closes this view",
    ):
        assert said in text, said
    assert ("1100/1590 MHz" in text) == (width == 140)


def test_bars_without_a_known_limit_say_what_the_highest_one_is() -> None:
    busier = msgspec.structs.replace(NOW, net_in_bytes_per_s=3 * 1024**2)
    lines = drawn(seen(NOW, busier, NOW), 80).splitlines()
    (disk,) = (line for line in lines if line.startswith("disk"))
    (network,) = (line for line in lines if line.startswith("network"))
    assert "900 MiB/s read, 1000 B/s written  max 900 MiB/s" in disk
    assert network.rstrip().endswith("max 4.0 MiB/s")
    assert "max" not in drawn(seen(NOW), 80)


def test_keys_arrive_one_by_one_and_the_terminal_is_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        before = termios.tcgetattr(terminal)
        keys: Queue[str] = Queue()
        with read_keys(keys.put):
            os.write(ours, b"?q")
            assert [keys.get(timeout=20), keys.get(timeout=20)] == ["?", "q"]
            assert termios.tcgetattr(terminal) != before
        assert termios.tcgetattr(terminal) == before
    os.close(ours)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_services_are_not_among_the_runs(width: int) -> None:
    container = ContainerMetrics(name="blender", person="bob")
    now = msgspec.structs.replace(NOW, runs=(SERVICE, container, RUN, OTHER))
    names = [line.split()[0] for line in drawn(seen(now), width).splitlines() if line.strip()]
    kinds = names[names.index("RUN") : names.index("PID")]
    assert kinds == ["RUN", "night", "cifar/x", "SERVICE", "tensorboard", "CONTAINER", "blender"]
    services = msgspec.structs.replace(NOW, runs=(SERVICE,))
    names = [line.split()[0] for line in drawn(seen(services), width).splitlines() if line.strip()]
    assert names[names.index("tensorboard") - 1] == "SERVICE"
    assert "RUN" not in names


def test_a_process_of_a_service_is_marked_where_there_is_room() -> None:
    board = msgspec.structs.replace(PROCESS, run="", service="tensorboard", name=SERVICE.name)
    now = msgspec.structs.replace(NOW, processes=(board,))
    assert "tensorboard (service)" in drawn(seen(now), 140)
    assert "tensorboard (" not in drawn(seen(now), 80)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_narrow_terminal_has_less_and_cuts_nothing(width: int) -> None:
    """Only a command, which has the rest of its line, may be cut."""
    lines = drawn(seen(NOW, NOW), width).splitlines()
    assert max(map(len, lines)) <= width
    cut = [line for line in lines if "…" in line]
    assert all("python" in line for line in cut)
    words = {word.strip("━─▁▂▇,") for line in lines if line not in cut for word in line.split()}
    assert words <= {word.strip("━─▁▂▇,") for word in drawn(seen(NOW, NOW), 300).split()}


def test_the_most_important_columns_are_kept() -> None:
    text = drawn(seen(NOW, NOW), 40)
    for figure in ("$1.17/h", "87%", "15.0/15.5 GiB", "84 °C", "100/400", "14.0 GiB", "python"):
        assert figure in text, figure
    assert {"POWER", "WHO", "IN"}.isdisjoint(text.split())
    assert {"HELD", "WHO", "CORES", "LEFT"} <= {*drawn(seen(NOW, NOW), 60).split()}


def test_a_server_without_a_gpu_says_nothing_of_gpus() -> None:
    quiet = msgspec.structs.replace(PROCESS, gpus=())
    text = drawn(seen(msgspec.structs.replace(NOW, gpus=(), processes=(quiet,))), 80)
    assert "GPU" not in text
    assert "night" in text


def test_what_was_not_measured_is_no_zero() -> None:
    text = drawn(seen(ServerMetrics(at=1.0, cores=2, gpus=(GpuMetrics(index="0"),))), 80)
    assert "not measured" in text
    assert "0%" not in text


def test_names_do_not_steer_the_terminal() -> None:
    evil = "\x1b[2J[red]x[/red]"
    run = msgspec.structs.replace(RUN, run=evil, person=evil)
    gpu = msgspec.structs.replace(T4, name=evil, throttle=(evil,))
    process = msgspec.structs.replace(PROCESS, command=evil, person=evil)
    text = drawn(
        seen(msgspec.structs.replace(NOW, gpus=(gpu,), runs=(run,), processes=(process,))), 140
    )
    assert "\x1b" not in text
    assert "\\x1b[2J[red]x[/red]" in text


def test_processes_give_way_in_a_low_terminal() -> None:
    many = tuple(msgspec.structs.replace(PROCESS, pid=1000 + n) for n in range(12))
    now = msgspec.structs.replace(NOW, processes=many)
    assert len(drawn(seen(now), 80, height=40).splitlines()) <= 40
    text = drawn(seen(now), 80, height=24)
    assert text.count("python train.py") < 12
    assert "Ctrl-C" in text


def overview(width: int, height: int = 0, now: ServerMetrics = NOW) -> str:
    """Four servers, of which the third has stopped answering."""
    views = [ServerSamples(rank, f"digits-{rank}", OURS, seen(now, now)) for rank in range(4)]
    views[2].cut = "gpu.example refuses connections"
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    console.print(render_overview("digits: 4 servers, $4.68/h", views, width, height))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 140])
def test_several_servers_have_a_row_each(width: int) -> None:
    text = overview(width)
    assert max(map(len, text.splitlines())) <= width
    rows = [line.split() for line in text.splitlines()]
    named = [row for row in rows if len(row) > 1 and row[1].startswith("digits-")]
    assert [row[0] for row in named] == ["0", "1", "2", "3"]
    assert ["7.2/48" in row for row in named] == [True, True, False, True]
    assert "no answer" in text
    assert "digits-2: gpu.example refuses connections" in text
    assert text.count("87%") == text.count("night") == 3
    assert "digits: 4 servers, $4.68/h" in text
    assert "labctl top --server N" in text


def test_a_server_that_sends_no_samples_any_more_has_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection is open, and a call to the driver of its GPU does not return."""
    views = [ServerSamples(0, "digits", OURS, seen(NOW, NOW)), ServerSamples(1, "digits-1", OURS)]
    later = time.monotonic() + STALE_S + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    views[0].add(NOW)

    def draw() -> list[str]:
        out = io.StringIO()
        Console(file=out, width=80).print(render_overview("digits", views, 80))
        return [line for line in out.getvalue().splitlines() if "digits" in line][1:]

    first, second = draw()
    assert "7.2/48" in first
    assert "no answer" in second
    monkeypatch.setattr(time, "monotonic", lambda: later + STALE_S + 1)
    assert all("no answer" in line for line in draw())


def test_the_servers_stay_in_a_low_terminal_and_their_gpus_give_way() -> None:
    many = tuple(msgspec.structs.replace(T4, index=str(index)) for index in range(8))
    text = overview(80, 30, msgspec.structs.replace(NOW, gpus=many))
    assert len(text.splitlines()) <= 30
    assert text.count("digits-") == 5
    assert text.count("night") == 3
    left = 24 - text.count("T4")
    assert f"not shown: {left} GPUs" in text


def test_names_on_several_servers_do_not_steer_the_terminal() -> None:
    run = msgspec.structs.replace(RUN, run="\x1b[2J", person="\x1b[2J")
    gpu = msgspec.structs.replace(T4, name="\x1b[2J", throttle=("\x1b[2J",))
    assert "\x1b" not in overview(140, 0, msgspec.structs.replace(NOW, runs=(run,), gpus=(gpu,)))


def test_a_question_mark_shows_the_keys_and_hides_them_again() -> None:
    foot = top.Foot(top.HINT)
    texts = [foot.text]
    for _ in range(2):
        foot.switch()
        texts.append(foot.text)
    assert texts == [top.HINT, top.KEYS, top.HINT]


def test_a_lost_link_is_said_beside_the_last_picture() -> None:
    text = drawn(seen(NOW), 80, msgspec.structs.replace(ABOUT, cut="link lost, again in 2 s"))
    assert "link lost, again in 2 s" in text
    assert "7.2 of 48 cores" in text


def test_the_title_names_the_server_to_which_a_recovered_run_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    later = msgspec.structs.replace(SERVER, id="i-2", created_at=NOW.at - 30)
    servers = iter((SERVER, SERVER, later))
    drawn: list[Server] = []
    cuts: list[str] = []

    def follow(context: Any, add_sample: Any, on_cut: Any) -> None:
        add_sample(NOW)
        on_cut(ConnectError("gpu.example refuses connections"), 1.0)
        add_sample(NOW)

    def render(history: History, about: About, width: int, height: int) -> str:
        drawn.append(about.server)
        cuts.append(about.cut[9:])
        return ""

    monkeypatch.setattr(top, "follow", follow)
    monkeypatch.setattr(top.top_screen, "render_server", render)
    lab: Any = SimpleNamespace(id=OURS, context=SimpleNamespace(get_server=lambda: next(servers)))
    top._show_live(lab)
    assert drawn == [SERVER, SERVER, SERVER, later]
    # A stopped server refuses connections, too: nobody knows whether its runs continue.
    assert cuts[2] == "gpu.example refuses connections; retrying in 1 s; q quits"


def test_a_run_s_time_left_comes_from_its_pace() -> None:
    def at(moment: float, step: float) -> ServerMetrics:
        run = msgspec.structs.replace(RUN, step=step)
        return msgspec.structs.replace(NOW, at=moment, runs=(run,))

    history = seen(at(0, 100))
    assert history.estimate_left_s(RUN) is None
    for moment, step in ((1, 100), (4, 110)):
        history.add(at(moment, step))
    assert history.estimate_left_s(RUN) is None  # too short a time to tell
    history.add(at(10, 150))
    history.add(at(12, 150))
    assert history.estimate_left_s(RUN) == pytest.approx((400 - 150) / (50 / 10))
    history.add(at(13, 120))  # it went back to a checkpoint
    assert history.estimate_left_s(RUN) is None


@pytest.mark.parametrize(
    ("figures", "width", "most", "line"),
    [
        ([], 3, None, "   "),
        ([0.0, 0.0], 3, None, " ▁▁"),
        ([0.0, 50.0, 100.0], 3, 100.0, "▁▄▇"),
        ([None, 200.0, -5.0], 3, 100.0, " ▇▁"),
        ([1.0, 2.0, 4.0], 4, None, " ▂▄▇"),
    ],
)
def test_sparklines(figures: list[float | None], width: int, most: float | None, line: str) -> None:
    assert render_sparkline(figures, width, most) == line


def test_terminals_that_know_no_bars_get_letters() -> None:
    assert render_sparkline([0.0, 100.0], 2, 100.0, PLAIN_BARS) == "_#"
    assert len(PLAIN_BARS) == len(BARS)
    about = msgspec.structs.replace(ABOUT, bars=PLAIN_BARS)
    text = drawn(seen(NOW, NOW), 140, about)
    assert "##" in text
    assert not {*BARS, "━", "─"} & {*text}


def test_the_history_is_bounded() -> None:
    history = History()
    for moment in range(KEPT + 50):
        history.add(msgspec.structs.replace(NOW, at=float(moment)))
    assert len(history.render_line("cpu", 10_000).strip()) == KEPT


def test_without_a_server_the_next_command_is_named(labctl: Any) -> None:
    for words in (("top",), ("top", "--once"), ("top", "--json")):
        said = labctl(*words)
        assert said.code == 4
        assert "labctl up" in said.err
