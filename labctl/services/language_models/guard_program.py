"""Starts an engine, and passes requests on to it unless a foreign web page sends them.

labctl passes this text to the Python of the service's image. Its arguments are the port, the port
of the engine on the loopback, and the engine's command. The engines answer requests for any host
name: a web page could point its own name at the loopback and use an open forward (DNS rebinding).
Some of them also let pages of any origin read their answers.
"""

import asyncio
import re
import signal
import sys

OUR_HOSTS = ("127.0.0.1", "localhost")
ORIGIN = re.compile(r"https?://(127\.0\.0\.1|localhost)(:\d+)?")
MOST_HEAD_BYTES, HEAD_S = 64 * 1024, 30
END = b"\r\n\r\n"


def list_headers(head: bytes) -> list[tuple[str, str]]:
    """Return the names, in lower case, and the values of a request's headers."""
    parts = [line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:] if line]
    return [(name.lower(), value.strip()) for name, _, value in parts]


def find_refusal(head: bytes) -> str:
    """Say why a request is refused; "" if it is passed on."""
    headers = list_headers(head)
    if b"\n" in head.replace(b"\r\n", b"") or any(name != name.strip() for name, _ in headers):
        return "invalid headers"
    hosts = [value for name, value in headers if name == "host"]
    if len(hosts) != 1 or hosts[0].partition(":")[0].lower() not in OUR_HOSTS:
        return "the Host header is neither 127.0.0.1 nor localhost"
    origins = [value for name, value in headers if name == "origin"]
    if not all(ORIGIN.fullmatch(origin) for origin in origins):
        return "the request comes from a page of another site"
    return ""


def close_after_answer(head: bytes) -> bytes:
    """Ask the engine to close the connection after its answer: each request is checked."""
    lines = head[: -len(END)].split(b"\r\n")
    kept = [line for line in lines if not line.lower().startswith((b"connection:", b"keep-alive:"))]
    return b"\r\n".join([*kept, b"Connection: close"]) + END


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        pass  # one side has left; the other one is closed below


def refuse(writer: asyncio.StreamWriter, status: str, text: str) -> None:
    body = f"{text}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)


async def pass_on(
    head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
) -> None:
    try:
        answers, requests = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        refuse(writer, "503 Service Unavailable", "the engine is loading the model")
        return
    requests.write(close_after_answer(head))
    rest = asyncio.ensure_future(copy(reader, requests))
    try:
        await copy(answers, writer)
    finally:
        rest.cancel()
        requests.close()


async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    try:
        head = await asyncio.wait_for(reader.readuntil(END), HEAD_S)
        if reason := find_refusal(head):
            refuse(writer, "400 Bad Request", reason)
        else:
            await pass_on(head, reader, writer, port)
    except (OSError, asyncio.IncompleteReadError):
        pass  # no request came
    except asyncio.TimeoutError:  # noqa: UP041 - another class before Python 3.11
        pass
    except asyncio.LimitOverrunError:
        refuse(writer, "431 Request Header Fields Too Large", "the headers are too large")
    finally:
        writer.close()


async def main() -> int:
    port, own, *words = sys.argv[1:]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await handle(reader, writer, int(own))

    await asyncio.start_server(answer, "0.0.0.0", int(port), limit=MOST_HEAD_BYTES)
    engine = await asyncio.create_subprocess_exec(*words)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, engine.send_signal, number)
    code = await engine.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
