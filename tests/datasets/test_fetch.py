"""Pictures from the network: only where it is allowed, from public addresses, within bounds."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentrl import DataError
from agentrl.config import DataSection
from agentrl.data import fetch as fetching
from agentrl.data import row_task
from agentrl.data.fetch import fetch, is_public

from .conftest import RED


class Pictures(BaseHTTPRequestHandler):
    """/red.png, /large (without an end), /moved/N (N redirects), /text; anything else is not there."""

    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path.startswith("/moved/"):
            left = int(self.path.rpartition("/")[2])
            self.send_response(302)
            self.send_header("Location", f"/moved/{left - 1}" if left > 1 else "/red.png")
            self.end_headers()
        elif self.path == "/large":
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(bytes(65536))
        else:
            buffer = io.BytesIO()
            RED.save(buffer, "PNG")
            content = {"/red.png": buffer.getvalue(), "/text": b"hello"}.get(self.path)
            self.send_response(200 if content else 404)
            self.end_headers()
            self.wfile.write(content or b"")

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            return

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Pictures.asked = []
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "192.168.0.1",
        "169.254.169.254",
        "172.16.0.9",
        "0.0.0.0",
        "::1",
        "fe80::1%eth0",
        "fd00::1",
        "::ffff:127.0.0.1",
        "::127.0.0.1",
        "::ffff:0:a00:1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "fec0::1",
        "224.0.0.1",
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


def test_public_addresses() -> None:
    assert is_public("8.8.8.8") and is_public("2001:4860:4860::8888") and is_public("64:ff9b::808:808")


def test_a_private_address_is_never_asked(site: str, tmp_path: Path) -> None:
    port = site.rpartition(":")[2]
    for url in (f"{site}/red.png", f"http://localhost:{port}/red.png", f"http://[::ffff:127.0.0.1]:{port}/red.png"):
        with pytest.raises(DataError, match="private address"):
            fetch(url)
    allowed = DataSection(path="data.jsonl", image_key="image", allow_urls=True)
    with pytest.raises(DataError, match=r"row 3 of data.jsonl: .*private"):
        row_task(3, {"input": "a", "image": f"{site}/red.png"}, allowed)
    assert Pictures.asked == []


def test_what_is_fetched_and_what_is_not(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "is_public", lambda address: True)
    monkeypatch.setattr(fetching, "MAX_BYTES", 500_000)
    allowed = DataSection(path="data.jsonl", image_key="image", allow_urls=True)
    for _ in range(2):
        task = row_task(0, {"input": "a", "image": f"{site}/moved/3"}, allowed)
        assert task.images[0].pil.tobytes() == RED.tobytes()
    assert len(Pictures.asked) == 4, "it is fetched once"
    for path, message in {
        "moved/9": "more than 3 redirects",
        "large": "larger than",
        "none": "status 404",
        "text": "cannot read an image",
    }.items():
        with pytest.raises(DataError, match=message):
            row_task(0, {"input": "a", "image": f"{site}/{path}"}, allowed)
    with pytest.raises(DataError, match="no http or https address"):
        fetch("file:///etc/hostname")
