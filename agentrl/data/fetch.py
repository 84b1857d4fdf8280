"""Pictures from the network: public addresses alone, bounded in size and time, fetched once."""

from __future__ import annotations

import functools
import hashlib
import http.client
import ipaddress
import os
import socket
import ssl
import tempfile
import time
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from ..errors import DataError

MAX_BYTES = 20_000_000
TIMEOUT_S = 20.0
MAX_REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
TRANSLATED = tuple(map(ipaddress.IPv6Network, ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96")))


def fetch(url: str) -> bytes:
    """The bytes at a URL, kept in the cache folder so that they stay what they were. Raises DataError."""
    file = _cache() / hashlib.sha256(url.encode()).hexdigest()
    if file.is_file():
        return file.read_bytes()
    try:
        content = _download(url, time.monotonic() + TIMEOUT_S)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DataError(f"{url[:200]}: {type(error).__name__}: {error}") from error
    _keep(file, content)
    return content


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "images"


def _keep(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
    with os.fdopen(handle, "wb") as part:
        part.write(content)
    os.replace(name, file)


def _download(url: str, deadline: float) -> bytes:
    for _ in range(MAX_REDIRECTS + 1):
        target = urlsplit(url)
        if target.scheme not in PORTS or not target.hostname:
            raise DataError(f"{url[:200]} is no http or https address")
        connection = _connect(target.scheme, target.hostname, target.port or PORTS[target.scheme], deadline)
        try:
            path = (target.path or "/") + (f"?{target.query}" if target.query else "")
            connection.request("GET", path, headers={"User-Agent": "agentrl", "Accept": "image/*"})
            response = connection.getresponse()
            if response.status in (301, 302, 303, 307, 308):
                url = urljoin(url, response.headers.get("Location", ""))
                continue
            if response.status != 200:
                raise DataError(f"{url[:200]} answers with status {response.status}")
            return _read(response, url, deadline)
        finally:
            connection.close()
    raise DataError(f"{url[:200]}: more than {MAX_REDIRECTS} redirects")


def _connect(scheme: str, host: str, port: int, deadline: float) -> http.client.HTTPConnection:
    """A connection to one of the host's addresses, which are looked at first: the name is resolved once, here."""
    left = max(0.1, deadline - time.monotonic())
    addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    private = [address for address in addresses if not is_public(address)]
    if private or not addresses:
        raise DataError(f"{host} is a private address ({', '.join(private)}): images come from public ones alone")
    connection = http.client.HTTPConnection(host, port, timeout=left)
    plain = socket.create_connection((min(addresses), port), left)
    connection.sock = plain if scheme == "http" else _tls().wrap_socket(plain, server_hostname=host)
    return connection


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def is_public(address: str) -> bool:
    """Whether an IP address is one of the open internet; one that holds an IPv4 address is where that one is."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        held = ip.ipv4_mapped or ip.sixtofour or _last_32_bits(ip)
        if held is not None:
            return is_public(str(held))
        if ip.is_site_local:
            return False
    return ip.is_global and not ip.is_multicast


def _last_32_bits(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that translators find in one of their own (RFC 4291 2.5.5.1, RFC 2765, RFC 6052)."""
    if not any(ip in network for network in TRANSLATED):
        return None
    return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)


def _read(response: http.client.HTTPResponse, url: str, deadline: float) -> bytes:
    content = bytearray()
    while piece := response.read1(65536):
        content += piece
        if len(content) > MAX_BYTES:
            raise DataError(f"{url[:200]} is larger than {MAX_BYTES // 1_000_000} MB")
        if time.monotonic() > deadline:
            raise DataError(f"{url[:200]} took longer than {TIMEOUT_S:g} s")
    return bytes(content)
