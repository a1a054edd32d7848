"""A registry on a server's own loopback, for its Docker Engine to pull from: run there by root.

`tiny:1` is an image of one small layer. The layer of `huge:1` is said to have a GiB, and comes in
small pieces: a pull that is given up leaves the file named by the first word behind.
"""

import gzip
import hashlib
import http.server
import io
import json
import pathlib
import sys
import tarfile
import time

text = io.BytesIO()
with tarfile.open(fileobj=text, mode="w") as tar:
    info = tarfile.TarInfo("hello")
    info.size = 5
    tar.addfile(info, io.BytesIO(b"hello"))
LAYER = gzip.compress(text.getvalue())
HUGE = 1 << 30


def digest(content):
    return "sha256:" + hashlib.sha256(content).hexdigest()


def config(layer):
    told = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": ["x"]},
        "rootfs": {"type": "layers", "diff_ids": [layer]},
    }
    return json.dumps(told).encode()


KIND = "application/vnd.docker.distribution.manifest.v2+json"


def manifest(image, layer, size):
    of = "application/vnd.docker."
    told = {
        "schemaVersion": 2,
        "mediaType": KIND,
        "config": {
            "mediaType": of + "container.image.v1+json",
            "size": len(image),
            "digest": digest(image),
        },
        "layers": [
            {
                "mediaType": of + "image.rootfs.diff.tar.gzip",
                "size": size,
                "digest": layer,
            }
        ],
    }
    return json.dumps(told).encode()


HUGE_DIGEST = digest(b"huge")
TINY_CONFIG, HUGE_CONFIG = config(digest(text.getvalue())), config(HUGE_DIGEST)
BLOBS = {digest(one): one for one in (TINY_CONFIG, HUGE_CONFIG, LAYER)}
MANIFESTS = {
    "tiny": manifest(TINY_CONFIG, digest(LAYER), len(LAYER)),
    "huge": manifest(HUGE_CONFIG, HUGE_DIGEST, HUGE),
}


class Registry(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        words = self.path.split("/")
        if "manifests" in words:
            self.reply(MANIFESTS[words[2]], KIND)
        elif words[-1] == HUGE_DIGEST:
            self.reply_for_ever()
        elif "blobs" in words:
            self.reply(BLOBS[words[-1]], "application/octet-stream")
        else:
            self.reply(b"{}", "application/json")

    do_HEAD = do_GET

    def reply(self, content, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Docker-Content-Digest", digest(content))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def reply_for_ever(self):
        self.send_response(200)
        self.send_header("Content-Length", str(HUGE))
        self.end_headers()
        try:
            while True:
                self.wfile.write(bytes(65536))
                time.sleep(0.05)
        except OSError:
            pathlib.Path(sys.argv[1]).touch()


http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Registry).serve_forever()
