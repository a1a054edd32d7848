"""Confining the process that reads untrusted files, so that a bug in a parser gives no access.

On Linux a confined process can read and write its open files, use memory up to a limit, and exit.
It cannot open files or connections, start processes or send signals. The kernel enforces that until
it ends (seccomp, as sshd uses before a login), without root and without anything to install. On
other systems only the limits on memory and time apply.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from contextlib import suppress

from labctl.errors import LabError

UNCONFINED = (
    "on this system labctl limits only the memory and time of the process that reads students' "
    "files; run the receiver on Linux (x86_64 or aarch64), where that process is also sandboxed"
)

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_MODE_FILTER = 2
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_REFUSE = 0x00050000 | 1  # EPERM
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_AT, _ARCH_AT = 0, 4

# The kernel's number of each architecture, and its permitted system calls by number.
_CALLS: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (0xC000003E, {
        "read": 0, "write": 1, "close": 3, "fstat": 5, "lseek": 8, "mmap": 9, "mprotect": 10,
        "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
        "pread64": 17, "sched_yield": 24, "mremap": 25, "madvise": 28, "getpid": 39, "exit": 60,
        "sigaltstack": 131, "gettid": 186, "futex": 202, "restart_syscall": 219,
        "clock_gettime": 228, "exit_group": 231, "newfstatat": 262, "getrandom": 318, "rseq": 334,
    }),
    "aarch64": (0xC00000B7, {
        "close": 57, "lseek": 62, "read": 63, "write": 64, "pread64": 67, "newfstatat": 79,
        "fstat": 80, "exit": 93, "exit_group": 94, "futex": 98, "clock_gettime": 113,
        "sched_yield": 124, "restart_syscall": 128, "sigaltstack": 132, "rt_sigaction": 134,
        "rt_sigprocmask": 135, "rt_sigreturn": 139, "getpid": 172, "gettid": 178, "brk": 214,
        "munmap": 215, "mremap": 216, "mmap": 222, "mprotect": 226, "madvise": 233,
        "getrandom": 278, "rseq": 293,
    }),
}  # fmt: skip


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def has_filter() -> bool:
    """Tell whether labctl can sandbox a process on this system, beyond memory and time."""
    return sys.platform == "linux" and platform.machine() in _CALLS


def confine(memory_bytes: int, cpu_s: int) -> None:
    """Confine this process until it ends. Import everything before.

    Raises:
        LabError: the kernel supports it, but refuses.
    """
    limit_memory(memory_bytes)
    for kind, limit in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    if has_filter():
        _install_filter()


def limit_memory(memory_bytes: int) -> None:
    """Limit this process's memory; its children may raise the limit up to the system's own."""
    with suppress(ValueError, OSError):  # macOS has no such limit
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        bound = memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most)
        resource.setrlimit(resource.RLIMIT_AS, (bound, most))


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _install_filter() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    text = _build_filter(*_CALLS[platform.machine()])
    buffer = ctypes.create_string_buffer(text, len(text))
    program = _Program(len(text) // 8, ctypes.addressof(buffer))
    failed = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0
    )
    if failed:
        raise LabError(
            "this machine cannot sandbox the process that reads students' files",
            why=f"the kernel refuses a seccomp filter: {os.strerror(ctypes.get_errno())}",
            hint="run the receiver on a machine whose kernel has seccomp (CONFIG_SECCOMP_FILTER)",
        )


def _build_filter(arch: int, calls: dict[str, int]) -> bytes:
    """Return the filter as BPF: calls of another architecture kill, unknown calls fail."""
    lines = [(_LOAD, 0, 0, _ARCH_AT), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL)]
    lines.append((_LOAD, 0, 0, _NUMBER_AT))
    for number in sorted(calls.values()):
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    lines.append((_RETURN, 0, 0, _REFUSE))
    return b"".join(struct.pack("=HBBL", *line) for line in lines)
