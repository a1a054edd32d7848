"""What a container uses, read from control groups of both versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from labctl.agent.host.container_usage import (
    CgroupV1,
    CgroupV2,
    DiskTraffic,
    GroupUsage,
    NetworkTraffic,
    find_group,
    parse_disk_v1,
    parse_disk_v2,
    parse_network,
    read_kernel_number,
    read_kernel_rows,
)

MEMINFO = read_kernel_rows(Path("/proc/meminfo"))["MemTotal:"] * 1024
WIRES = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets
    lo:  900       9    0    0    0     0          0         0      900       9
  eth0: 1200      12    0    0    0     0          0         0      340       4
  eth1:   30       1    0    0    0     0          0         0        5       1
"""


def tree(top: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return top


def version2(top: Path, limit: str = "1073741824") -> Path:
    return tree(
        top,
        {
            "cgroup.events": "populated 1\nfrozen 0\n",
            "cgroup.procs": "7\n9\n11\n",
            "cpu.stat": "usage_usec 2500000\nuser_usec 2000000\n",
            "memory.current": "500000000\n",
            "memory.max": f"{limit}\n",
            "memory.stat": "anon 1\ninactive_file 200000000\nactive_file 100000000\n",
            "io.stat": "8:0 rbytes=4096 wbytes=8192 rios=1\n8:16 rbytes=4 wbytes=0\n",
        },
    )


def version1(top: Path, group: str = "", limit: str = "1073741824") -> Path:
    files = {
        f"memory/{group}/cgroup.procs": "7\n9\n",
        f"memory/{group}/memory.usage_in_bytes": "500000000",
        f"memory/{group}/memory.limit_in_bytes": limit,
        f"memory/{group}/memory.stat": (
            "inactive_file 5\ntotal_inactive_file 200000000\ntotal_active_file 100000000\n"
        ),
        f"cpuacct/{group}/cpuacct.usage": "2500000000\n",
        f"blkio/{group}/blkio.throttle.io_service_bytes": (
            "8:0 Read 4096\n8:0 Write 8192\n8:0 Total 12288\n8:16 Read 4\nTotal 12292\n"
        ),
    }
    return tree(top, files)


USED = GroupUsage(
    cpu_s=2.5,
    memory_bytes=200_000_000,
    memory_limit_bytes=1_073_741_824,
    disk=DiskTraffic(4100, 8192),
    processes=3,
)


def test_both_versions_tell_the_same(tmp_path: Path) -> None:
    folder = version2(tmp_path / "two")
    assert CgroupV2(folder).read() == USED
    top = version1(tmp_path / "one")
    group = CgroupV1({name: top / name for name in ("memory", "cpuacct", "blkio")})
    assert group.read() == USED._replace(processes=2)


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_without_a_limit_the_machine_is_the_limit(tmp_path: Path, limit: str) -> None:
    assert CgroupV2(version2(tmp_path / "two", limit)).read().memory_limit_bytes == MEMINFO


def test_what_cannot_be_read_is_absent(tmp_path: Path) -> None:
    usage = CgroupV2(tmp_path).read()
    assert usage._replace(memory_limit_bytes=None) == (None, None, None, DiskTraffic(), None)
    assert not CgroupV2(tmp_path).is_alive()


def test_an_ended_container_is_seen(tmp_path: Path) -> None:
    folder = version2(tmp_path)
    assert CgroupV2(folder).is_alive()
    (folder / "cgroup.events").write_text("populated 0\nfrozen 0\n")
    assert not CgroupV2(folder).is_alive()


def process(top: Path, cgroup: str) -> Path:
    return tree(top, {"cgroup": cgroup})


def test_a_group_is_found_as_the_machine_sees_it(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    version2(groups / "docker/abc")
    found = find_group(process(tmp_path / "proc", "0::/docker/abc\n"), groups)
    assert isinstance(found, CgroupV2)
    assert found.folder == groups / "docker/abc"


def test_a_group_of_version_1_is_found_by_its_controller(tmp_path: Path) -> None:
    groups = version1(tmp_path / "groups", "docker/abc")
    lines = "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n3:blkio:/docker/abc\n"
    found = find_group(process(tmp_path / "proc", lines), groups)
    assert isinstance(found, CgroupV1)
    assert found.folders["cpuacct"] == groups / "cpuacct/docker/abc"


def test_where_the_tree_is_not_seen_the_container_s_own_is_read(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    proc = process(tmp_path / "proc", "0::/../elsewhere\n")
    inside = proc / "root" / str(groups).lstrip("/")
    version2(inside)
    found = find_group(proc, groups)
    assert isinstance(found, CgroupV2)
    assert found.folder == inside


def test_no_group_is_none(tmp_path: Path) -> None:
    assert find_group(tmp_path / "gone", tmp_path / "groups") is None


def test_what_leaves_the_container_counts_and_the_loopback_does_not(tmp_path: Path) -> None:
    file = tmp_path / "dev"
    file.write_text(WIRES)
    assert parse_network(file) == NetworkTraffic(1230, 345)
    assert parse_network(tmp_path / "absent") == NetworkTraffic()


@pytest.mark.parametrize(
    ("read", "text", "found"),
    [
        (parse_disk_v1, "", DiskTraffic()),
        (parse_disk_v1, "Total 0\n", DiskTraffic(0, 0)),
        (parse_disk_v2, "", DiskTraffic()),
        (parse_disk_v2, "8:0 \n", DiskTraffic()),
    ],
)
def test_disks_that_tell_nothing(read: Any, text: str, found: DiskTraffic) -> None:
    assert read(text) == found


def test_numbers_are_read_or_absent(tmp_path: Path) -> None:
    file = tmp_path / "number"
    for text, found in (("42\n", 42), ("max\n", None), ("", None), ("-1\n", None)):
        file.write_text(text)
        assert read_kernel_number(file) == found
    assert read_kernel_number(tmp_path / "absent") is None
