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

import h11

OUR_HOSTS = ("127.0.0.1", "localhost")
ORIGIN = re.compile(r"https?://(127\.0\.0\.1|localhost)(:\d+)?")
MOST_HEAD_BYTES, HEAD_S = 64 * 1024, 30
END = b"\r\n\r\n"
# of the client's connection, not of the one to the engine
HOP_HEADERS = (b"connection", b"keep-alive")


def parse_request(head: bytes) -> h11.Request:
    """Parse the head of a request. RemoteProtocolError unless it is valid, with one Host."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEAD_BYTES)
    connection.receive_data(head)
    request = connection.next_event()
    if not isinstance(request, h11.Request):
        raise h11.RemoteProtocolError("there is no request")
    return request


def find_refusal(request: h11.Request) -> str:
    """Say why a request is refused; "" if it is passed on."""
    headers = [(name, value.decode("latin-1")) for name, value in request.headers]
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) != 1 or hosts[0].partition(":")[0].lower() not in OUR_HOSTS:
        return "the Host header is neither 127.0.0.1 nor localhost"
    origins = [value for name, value in headers if name == b"origin"]
    if not all(ORIGIN.fullmatch(origin) for origin in origins):
        return "the request comes from a page of another site"
    return ""


def build_head(request: h11.Request) -> bytes:
    """Build the head for the engine, which closes the connection: each request is checked."""
    kept = [each for each in request.headers.raw_items() if each[0].lower() not in HOP_HEADERS]
    passed_on = h11.Request(
        method=request.method, target=request.target, headers=[*kept, (b"Connection", b"close")]
    )
    return h11.Connection(h11.CLIENT).send(passed_on) or b""


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
    request: h11.Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
) -> None:
    try:
        answers, requests = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        refuse(writer, "503 Service Unavailable", "the engine is loading the model")
        return
    requests.write(build_head(request))
    rest = asyncio.ensure_future(copy(reader, requests))
    try:
        await copy(answers, writer)
    finally:
        rest.cancel()
        requests.close()


async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    try:
        head = await asyncio.wait_for(reader.readuntil(END), HEAD_S)
        request = parse_request(head)
        if reason := find_refusal(request):
            refuse(writer, "400 Bad Request", reason)
        else:
            await pass_on(request, reader, writer, port)
    except h11.RemoteProtocolError as error:
        refuse(writer, "400 Bad Request", str(error))
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
