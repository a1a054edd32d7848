"""gpuhunt's price catalog of a cloud, for offers without that cloud's credentials.

gpuhunt (github.com/dstackai/gpuhunt) publishes one catalog for each cloud several times a day, as a
zipped table that anybody may download. The copy in labctl's cache is used for REFRESH_S, and
longer while a newer one cannot be downloaded: every price says when it was published.
GPUHUNT_CATALOG_URL names another address, as for gpuhunt itself.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

import msgspec

from labctl.config.directories import copy_environment
from labctl.decoding import decode_json
from labctl.errors import ConnectError, UsageError
from labctl.http_client import describe_failure, open_session, read_body
from labctl.model import Value
from labctl.providers.caller_network import parse_address_source

CATALOG_URL = "https://dstack-gpu-pricing.s3.eu-west-1.amazonaws.com/v3"
ADDRESS_VARIABLE = "GPUHUNT_CATALOG_URL"
REFRESH_S = 6 * 3600.0
TIMEOUT_S = 20.0
MOST_BYTES = 64 * 1024**2
# The format of the file in the cache.
EDITION = 2


class CatalogRow(Value, frozen=True):
    """One machine in one place, with its price. `memory_gib` and `gpu_memory_gib` are in GiB.

    Of some clouds, gpuhunt counts the main memory in GB instead. Its `flags` mark what is not an
    ordinary machine, differently for each cloud.
    """

    type: str
    location: str
    price_usd_per_hour: float
    cpus: int
    memory_gib: float
    gpu_count: int
    gpu_name: str
    gpu_memory_gib: float
    gpu_maker: str
    spot: bool
    arch: str
    flags: tuple[str, ...] = ()


class PriceCatalog(Value, frozen=True):
    """The rows of a cloud, published at `published_at` and fetched at `fetched_at` (Unix s)."""

    published_at: float
    fetched_at: float
    rows: tuple[CatalogRow, ...]
    edition: int = EDITION


def find_address() -> str:
    """Return the address of the catalogs: of the environment, else gpuhunt's own."""
    address = copy_environment().get(ADDRESS_VARIABLE, "")
    try:
        return parse_address_source(address) if address else CATALOG_URL
    except ValueError as error:
        raise UsageError(
            f"{ADDRESS_VARIABLE} is not an address of price catalogs",
            why=str(error),
            hint=f"unset {ADDRESS_VARIABLE}",
        ) from None


def load_catalog(
    cloud: str, cache_dir: Path | None, url: str, wanted: Callable[[CatalogRow], bool]
) -> PriceCatalog:
    """Load a cloud's catalog, from the cache or from `url`; only rows that are `wanted`.

    ConnectError if there is neither.
    """
    return load_cached(cloud, cache_dir, lambda: _download(cloud, url, wanted))


def load_cached(
    name: str, cache_dir: Path | None, download: Callable[[], PriceCatalog]
) -> PriceCatalog:
    """Load the catalog that the cache has under this name, or download it if it is too old.

    An old one is used if the download raises ConnectError; without one, that is raised.
    """
    path = cache_dir / f"prices-{name}.json" if cache_dir else None
    cached = _read_cache(path)
    if cached is not None and time.time() - cached.fetched_at < REFRESH_S:
        return cached
    try:
        catalog = download()
    except ConnectError:
        if cached is None:
            raise
        return cached
    if path is not None:
        _write_cache(path, catalog)
    return catalog


def _write_cache(path: Path, catalog: PriceCatalog) -> None:
    # A catalog that cannot be written is fetched again next time.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=".")
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(catalog))
        Path(draft).replace(path)


def _read_cache(path: Path | None) -> PriceCatalog | None:
    try:
        catalog = decode_json(path.read_bytes(), PriceCatalog) if path else None
    except (OSError, msgspec.DecodeError):
        return None
    return catalog if catalog is not None and catalog.edition == EDITION else None


def _download(cloud: str, url: str, wanted: Callable[[CatalogRow], bool]) -> PriceCatalog:
    base = f"{url.rstrip('/')}/{cloud}"
    try:
        with open_session() as session:
            with session.get(f"{base}/version", timeout=TIMEOUT_S, stream=True) as response:
                response.raise_for_status()
                version = read_body(response, 64).decode("ascii").strip()
            address = f"{base}/{version}/catalog.zip"
            with session.get(address, timeout=TIMEOUT_S, stream=True) as response:
                response.raise_for_status()
                published = response.headers.get("Last-Modified", "")
                data = read_body(response, MOST_BYTES)
        with zipfile.ZipFile(io.BytesIO(data)) as archive, archive.open(f"{cloud}.csv") as table:
            rows = tuple(filter(wanted, _parse_rows(io.TextIOWrapper(table, "utf-8"))))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ConnectError(
            f"the price catalog of {cloud} could not be downloaded",
            why=describe_failure(error, base),
            hint="check the network, then run the same command again",
        ) from error
    now = time.time()
    return PriceCatalog(published_at=_parse_date(published) or now, fetched_at=now, rows=rows)


def _parse_rows(table: io.TextIOWrapper) -> Iterator[CatalogRow]:
    for row in csv.DictReader(table):
        # gpuhunt itself skips such rows, too.
        try:
            parsed = _parse_row(row)
        except ValueError:
            continue
        yield parsed


def _parse_row(row: dict[str, str]) -> CatalogRow:
    count = int(row["gpu_count"] or 0)
    return CatalogRow(
        type=row["instance_name"],
        location=row["location"],
        price_usd_per_hour=float(row["price"]),
        cpus=int(row["cpu"] or 0),
        memory_gib=float(row["memory"] or 0),
        gpu_count=count,
        gpu_name=row["gpu_name"] or "",
        gpu_memory_gib=float(row["gpu_memory"] or 0),
        # A catalog without this column has only NVIDIA's GPUs.
        gpu_maker=(row.get("gpu_vendor") or "nvidia") if count else "",
        spot=row["spot"].lower() == "true",
        arch={"arm": "arm64"}.get(row.get("cpu_arch") or "", "x86_64"),
        flags=tuple((row.get("flags") or "").split()),
    )


def _parse_date(text: str) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp()
    except ValueError:
        return None
