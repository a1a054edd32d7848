"""gpuhunt's published price catalogs on loopback: small, and in the form of the real files."""

from __future__ import annotations

import io
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HEADER = (
    "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,"
    "gpu_vendor,flags,cpu_arch,provider_data\n"
)
# 1 November 2025, 12:00 UTC
PUBLISHED_AT = 1_761_998_400
PUBLISHED = "Sat, 01 Nov 2025 12:00:00 GMT"
CATALOGS = {
    "aws": (
        "g4dn.xlarge,us-east-1,0.526,4,16.0,1,T4,16.0,False,,nvidia,,x86,{}\n"
        "g4dn.xlarge,us-east-1,0.17,4,16.0,1,T4,16.0,True,,nvidia,,x86,{}\n"
        "g4dn.xlarge,eu-west-1,0.587,4,16.0,1,T4,16.0,False,,nvidia,,x86,{}\n"
        "g4ad.xlarge,us-east-1,0.379,4,16.0,1,V520,8.0,False,,amd,,x86,{}\n"
        "p3.2xlarge,us-east-1,3.06,8,61.0,1,V100,16.0,False,,nvidia,,x86,{}\n"
        "t3.large,us-east-1,0.083,2,8.0,0,,,False,,,,x86,{}\n"
    ),
    "gcp": (
        "n1-standard-4,us-central1-a,0.54,4,15.0,1,T4,16.0,False,,nvidia,,x86,{}\n"
        "e2-standard-4,us-central1-a,0.13,4,16.0,0,,,True,,,,x86,{}\n"
    ),
    "lambdalabs": (
        "gpu_1x_a10,us-east-1,0.75,30,214.8,1,A10,24.0,False,1503.6,nvidia,,x86,{}\n"
        "gpu_1x_a10,us-west-1,0.75,30,214.8,1,A10,24.0,False,1503.6,nvidia,,x86,{}\n"
        "gpu_1x_gh200,us-east-1,1.49,64,463.968,1,GH200,96.0,False,4398.1,nvidia,lambda-arm,arm,{}\n"
        "gpu_broken,us-east-1,free,30,214.8,1,A10,24.0,False,,nvidia,,x86,{}\n"
    ),
    "runpod": (
        "NVIDIA L4,EU-RO-1,0.43,12,50.0,1,L4,24,False,,nvidia,,x86,{}\n"
        "NVIDIA L4,EU-RO-1,0.86,24,100.0,2,L4,24,False,,nvidia,,x86,{}\n"
        "NVIDIA L4,US,0.3,12,50.0,1,L4,24,False,,nvidia,,x86,{}\n"
        "AMD Instinct MI300X OAM,EU-RO-1,0.1,24,283.0,1,MI300X,192,False,,amd,,x86,{}\n"
        "NVIDIA H200,US-TX-1,0.2,24,283.0,8,H200,141,False,,nvidia,runpod-cluster,x86,"
        '"{""pod_counts"": [2, 3]}"\n'
        "cpu3c-2-4,EU-RO-1,0.06,2,4,0,,,False,20.0,,runpod-cpu,x86,{}\n"
    ),
}  # fmt: skip


@contextmanager
def serve_prices(catalogs: Mapping[str, str] = CATALOGS) -> Iterator[str]:
    """Serve these rows of each cloud's catalog, as they are now; yield the address."""

    class Catalogs(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _, cloud, *rest = self.path.split("/")
            body = _find_file(catalogs, cloud, rest)
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"")))
            self.send_header("Last-Modified", PUBLISHED)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *words: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Catalogs)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _find_file(catalogs: Mapping[str, str], cloud: str, rest: list[str]) -> bytes | None:
    if cloud not in catalogs:
        return None
    if rest == ["version"]:
        return b"20251101-33\n"
    if rest == ["20251101-33", "catalog.zip"]:
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr(f"{cloud}.csv", HEADER + catalogs[cloud])
        return packed.getvalue()
    return None
