"""The page for students with a certificate of its own: https, and cookies that only it can set."""

from __future__ import annotations

import datetime
import http.client
import ipaddress
import socket
import ssl
import sys
import threading
import time
import urllib.parse
from pathlib import Path

from course_keeper_context import Pretended
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from labctl.courses import join_codes
from labctl.courses.requests import RequestHandler
from labctl.web import http_server

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from dashboard_bed import make

CODE = "abcdefgh" * 4


def write_certificate(folder: Path, names: tuple[str, ...] = ("localhost",)) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and these names, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    addresses = [address, *(x509.DNSName(name) for name in names)]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return cert_file, key_file


def test_the_page_has_a_certificate_and_a_cookie_of_its_own(tmp_path: Path) -> None:
    bed = make(tmp_path)
    cert, key = write_certificate(tmp_path)
    port, services_port = choose_ports()
    url = f"https://127.0.0.1:{port}"
    stop = threading.Event()
    trust = ssl.create_default_context(cafile=str(cert))
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=trust, timeout=60)
    services = http.client.HTTPSConnection("localhost", services_port, context=trust)
    http_server.serve_student_page(
        bed.folder,
        bed.paths,
        bed.state,
        http_server.StudentSettings(
            port=port,
            url=url,
            services_port=services_port,
            services_url=f"https://localhost:{services_port}",
            tls_cert=str(cert),
            tls_key=str(key),
        ),
        request_handler=RequestHandler(bed.folder, Pretended(bed.folder)),
        stop=stop,
    )
    try:
        public = join_codes.derive_key_pair(bed.folder.id, "lovelace", CODE)[1]
        join_codes.store_page_code(bed.folder, "lovelace", public, int(time.time() + 1000))
        form = urllib.parse.urlencode({"csrf": "", "student": "lovelace", "code": CODE})
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        connection.request("POST", "/sign-in", form, {**headers, "Origin": url})
        answer = connection.getresponse()
        answer.read()
        cookie = answer.headers["set-cookie"]
        assert answer.status == 303
        assert cookie.startswith("__Host-labctl-student-")
        assert "secure" in cookie.lower()
        assert "domain" not in cookie.lower()
        connection.request("GET", "/", headers={"Cookie": cookie.partition(";")[0]})
        answer = connection.getresponse()
        assert "Ada Lovelace" in answer.read().decode()
        # The same address without TLS is another origin.
        headers["Origin"] = url.replace("https", "http")
        connection.request("POST", "/sign-in", form, headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 403
        services.request("GET", "/lab")
        assert services.getresponse().status == 403
    finally:
        connection.close()
        services.close()
        stop.set()
        bed.state.close()


def choose_ports() -> tuple[int, int]:
    """Two free ports: the addresses that browsers open name them in advance."""
    with socket.socket() as one, socket.socket() as two:
        for listener in (one, two):
            listener.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]
