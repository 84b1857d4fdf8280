"""A hub on this machine: the routes that `datasets` and its client ask, over one folder of files a dataset."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of a hub whose datasets are the folders OWNER/NAME below `folder`."""
    handler = type("Handler", (Hub,), {"folder": folder})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Hub(BaseHTTPRequestHandler):
    """GET and HEAD of files (with ranges), the description, the tree and the paths of a dataset."""

    folder: Path
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._route(body=False)

    def do_GET(self) -> None:
        self._route(body=True)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        repo = self.folder / parts[2] / parts[3]
        found = [path for path in asked.get("paths", []) if (repo / path).exists()]
        self._json([_entry(repo, repo / path) for path in found], body=True)

    def _route(self, *, body: bool) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        match parts:
            case ["datasets", owner, name, "resolve", _, *file]:
                self._file(self.folder / owner / name / "/".join(file), body=body)
            case ["api", "datasets", owner, name, "tree", _, *below] if (self.folder / owner / name).is_dir():
                repo = self.folder / owner / name
                inside = repo / "/".join(below)
                self._json([_entry(repo, path) for path in sorted(inside.rglob("*"))], body=body)
            case ["api", "datasets", owner, name, *_] if (self.folder / owner / name).is_dir():
                self._json(_described(self.folder, f"{owner}/{name}"), body=body)
            case _:
                self._nothing("RepoNotFound")

    def _file(self, file: Path, *, body: bool) -> None:
        if not file.is_file():
            known = file.parent.is_dir()
            return self._nothing("EntryNotFound" if known else "RepoNotFound")
        content = file.read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        self._send(200, content, {**headers, "Accept-Ranges": "bytes"}, body=body)

    def _json(self, value: Any, *, body: bool) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, body=body)

    def _nothing(self, code: str) -> None:
        self._send(404, b"{}", {"X-Error-Code": code, "Content-Type": "application/json"}, body=True)

    def _send(self, status: int, content: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        return


def _described(folder: Path, hub_id: str) -> dict[str, Any]:
    files = [path for path in sorted((folder / hub_id).rglob("*")) if path.is_file()]
    siblings = [{"rfilename": str(path.relative_to(folder / hub_id))} for path in files]
    return {"_id": hub_id, "id": hub_id, "sha": COMMIT, "private": False, "siblings": siblings, "tags": []}


def _entry(repo: Path, path: Path) -> dict[str, Any]:
    name = str(path.relative_to(repo))
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": COMMIT, "size": 0}
    return {
        "type": "file",
        "path": name,
        "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
        "size": path.stat().st_size,
    }
