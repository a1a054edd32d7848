"""Calls of the labctl agent that are forked from a process which has imported it already.

A call is a process of its own, as on a server, but it need not start Python: that takes longer than
most calls. Run as a program, with the agent's directory, this file accepts calls on the socket that
is its standard input. Python's isolated mode runs it, so it imports nothing else of the tests.
"""

import array
import atexit
import gc
import json
import os
import re
import socket
import subprocess
import sys
import threading
import traceback
import types
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

# What a transport types to call the agent.
CALL = re.compile(
    r'\[ -f "(?P<file>[^"]+)" \] \|\| exit 97; '
    r'exec python3 -I -S "(?P=file)" (?P<verb>[a-z0-9-]+)$'
)
LARGEST_CALL_BYTES = 65_536
# Standard input, output and error of a call, and the pipe for its exit code: 4 bytes each.
DESCRIPTOR_BYTES = 4 * 4


# In the program: no part of a test's own process.


def serve(directory: str) -> None:
    entrypoint = _import_agent(directory)
    gc.freeze()
    calls = socket.socket(fileno=0)
    while True:
        message, ancillary, _, _ = calls.recvmsg(
            LARGEST_CALL_BYTES, socket.CMSG_SPACE(DESCRIPTOR_BYTES)
        )
        if not message:
            return
        descriptors = array.array("i", b"".join(data for _, _, data in ancillary))
        # The child of a child, so that nothing here waits for it.
        if (pid := os.fork()) == 0:
            if os.fork() == 0:
                _call(entrypoint, json.loads(message), list(descriptors))
            os._exit(0)
        os.waitpid(pid, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _import_agent(directory: str) -> types.ModuleType:
    """Import all that any verb imports, as the agent's __main__.py would."""
    sys.path.insert(0, directory)
    sys.modules["labctl"] = types.ModuleType("labctl")
    sys.modules["labctl"].__path__ = [directory]
    entrypoint = import_module("labctl.agent.entrypoint")
    for verbs in (entrypoint.VERBS, entrypoint.STREAMING_VERBS):
        for name in verbs.values():
            import_module(f"labctl.agent.{name.rpartition('.')[0]}")
    for name in ("shutil", "subprocess", "tarfile"):
        import_module(name)
    return entrypoint


def _call(entrypoint: types.ModuleType, call: dict[str, Any], descriptors: list[int]) -> None:
    *streams, outcome = descriptors
    code = 1
    try:
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(call["environ"])
        os.chdir(call["directory"])
        sys.argv = [call["file"], call["verb"]]
        code = entrypoint.main()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os.write(outcome, str(code).encode())
        os._exit(code)


# For tests.


class AgentForks:
    """The program with the agent of `directory`. It ends with this process."""

    def __init__(self, directory: str) -> None:
        self._calls, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._program = subprocess.Popen(
            ["python3", "-I", "-S", __file__, directory], stdin=theirs, start_new_session=True
        )
        theirs.close()
        atexit.register(self._end)

    def call(
        self, line: re.Match[str], stdin: bytes, environ: dict[str, str]
    ) -> subprocess.CompletedProcess[bytes]:
        """Run the line that CALL matched; return what a shell would."""
        file = line["file"].replace("$HOME", environ["HOME"])
        if not Path(file).is_file():
            return subprocess.CompletedProcess(file, 97, b"", b"")
        words = {"file": file, "verb": line["verb"]}
        call = {**words, "environ": environ, "directory": str(Path.cwd())}
        with TemporaryFile() as given, TemporaryFile() as stdout, TemporaryFile() as stderr:
            given.write(stdin)
            given.seek(0)
            code = self._send(call, [stream.fileno() for stream in (given, stdout, stderr)])
            stdout.seek(0)
            stderr.seek(0)
            return subprocess.CompletedProcess(file, code, stdout.read(), stderr.read())

    def _end(self) -> None:
        self._calls.close()
        self._program.wait()

    def _send(self, call: dict[str, object], streams: list[int]) -> int:
        """Have the call made; return its exit code, or -9 if a signal ended it."""
        reader, writer = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._calls, [json.dumps(call).encode()], [*streams, writer])
        finally:
            os.close(writer)
        try:
            return int(os.read(reader, 16) or b"-9")
        finally:
            os.close(reader)


if __name__ == "__main__":
    serve(sys.argv[1])
