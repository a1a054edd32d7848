"""A web server and a public bucket for tests, run inside a server's own network.

It knows ranges, ETags and `If-None-Match`, breaks off where asked to, and lists a bucket two keys
at a time. Every request is written to `requests.log` beside it: method, path, range, answer.
"""

import io
import sys
import tarfile
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PORT = int(sys.argv[1])
BODY = bytes(range(256)) * 8192
OBJECTS = {
    "sets/digits/a.png": b"first",
    "sets/digits/b.png": b"second" * 1000,
    "sets/digits/c/d.png": b"third",
    "sets/digits/": b"",
    "sets/digits-other/x": b"not asked for",
    "single.bin": b"alone",
}
broken = set()


def tarball(**names):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in names.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


FILES = {
    "/flaky.bin": BODY,
    "/same.bin": BODY,
    "/set.tar.gz": tarball(**{"train/1.png": b"one", "val/2.png": b"two"}),
    "/evil.tar.gz": tarball(**{"../../evil": b"x"}),
}


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path, _, query = self.path.partition("?")
        if path == "/forbidden":
            self.say(403)
        elif path == "/elsewhere":
            self.say(302, {"Location": "http://192.0.2.1/x"})
        elif path == "/huge.bin":
            self.say(200, {"Content-Length": str(10**15)})
            self.wfile.write(bytes(65536))  # curl shows a head once it has a byte of the body
        elif f"{path}/".startswith("/bucket/"):
            self.bucket(urllib.parse.unquote(path[8:]), dict(urllib.parse.parse_qsl(query)))
        elif path in FILES:
            self.file(path, FILES[path])
        else:
            self.say(404)

    def file(self, path, body):
        etag = f'"{abs(hash(body))}"'
        if self.headers.get("If-None-Match") == etag:
            self.say(304, {"ETag": etag})
            return
        start = 0
        asked = self.headers.get("Range", "")
        if asked and self.headers.get("If-Range", etag) == etag:
            start = int(asked[6:].split("-")[0])
        code = 206 if start else 200
        more = {"ETag": etag, "Content-Length": str(len(body) - start)}
        if start:
            more["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        self.say(code, more)
        if "flaky" in path and path not in broken:
            broken.add(path)
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(body[start:])

    def bucket(self, key, query):
        if "list-type" not in query:
            if key in OBJECTS:
                self.file("/" + key, OBJECTS[key])
            else:
                self.say(404)
            return
        keys = sorted(k for k in OBJECTS if k.startswith(query.get("prefix", "")))
        begin = int(query.get("continuation-token", "0"))
        more = begin + 2 < len(keys)
        text = "".join(
            f"<Contents><Key>{k}</Key><Size>{len(OBJECTS[k])}</Size>"
            f'<ETag>"{abs(hash(OBJECTS[k]))}"</ETag></Contents>'
            for k in keys[begin : begin + 2]
        )
        text += f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        if more:
            text += f"<NextContinuationToken>{begin + 2}</NextContinuationToken>"
        name = "http://s3.amazonaws.com/doc/2006-03-01/"
        body = f'<ListBucketResult xmlns="{name}">{text}</ListBucketResult>'.encode()
        self.say(200, {"Content-Length": str(len(body))})
        self.wfile.write(body)

    def say(self, code, headers=None):
        with Path("requests.log").open("a") as log:
            log.write(f"{self.path} {self.headers.get('Range', '-')} {code}\n")
        self.send_response(code)
        for name, value in {"Content-Length": "0", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_):
        pass


ThreadingHTTPServer(("127.0.0.1", PORT), Answers).serve_forever()
