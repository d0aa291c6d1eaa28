"""A Hub on this machine: revisions that move, redirects to a second host for large files, and faults on demand."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


def _headers_of(status: int) -> dict[str, Any]:
    return {"Retry-After": "0"} if status == 429 else {}


class FakeHub:
    """Repositories by name, each with commits by revision."""

    def __init__(self) -> None:
        self.revisions: dict[tuple[str, str], str] = {}  # (repository, revision) -> commit
        self.commits: dict[str, dict[str, bytes]] = {}
        self.requests: list[tuple[str, str, str | None, str | None]] = []  # (host, path, Range, Authorization)
        self.faults: list[int | str] = []  # of the next downloads: a status, "truncate" or "damage"
        self.redirect_to = ""  # in place of the second host
        self.listed: bytes | None = None  # in place of a list of files
        self.list_fault = ""  # of lists: "reset" within the body, "chunk" that is cut off, "drip" byte by byte
        self.moved_to = ""  # where the API says that repositories are
        self.sent = threading.Event()  # set with the first byte of a "hang"
        self.released = threading.Event()
        self.url = self.cdn = ""

    def push(self, repository: str, files: dict[str, bytes], revision: str = "main") -> str:
        """A commit that the revision names from now on."""
        content = [(name, hashlib.sha256(data).hexdigest()) for name, data in sorted(files.items())]
        commit = hashlib.sha1(json.dumps([repository, content]).encode()).hexdigest()
        self.commits[commit] = files
        self.revisions[repository, revision] = self.revisions[repository, commit] = commit
        return commit

    def listing(self, commit: str) -> dict[str, Any]:
        """As the REST API has it: weights are kept in LFS."""
        siblings = []
        for name, data in self.commits[commit].items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data)}
            entry["blobId"] = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
            if name.endswith((".safetensors", ".npy")):
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        return {"id": "x", "sha": commit, "siblings": siblings}

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        """Serves on two ports: the Hub and the host of large files."""
        servers = [ThreadingHTTPServer(("127.0.0.1", 0), self._handler()) for _ in range(2)]
        self.url, self.cdn = (f"http://127.0.0.1:{server.server_port}" for server in servers)
        threads = [threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}) for server in servers]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self.released.set()
            for server in servers:
                server.shutdown()
                server.server_close()
            for thread in threads:
                thread.join()

    def _handler(hub) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                headers = self.headers
                host = f"http://{headers['Host']}"
                hub.requests.append((host, self.path, headers["Range"], headers["Authorization"]))
                parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
                if parts[:2] == ["api", "models"]:
                    self._list("/".join(parts[2:4]), parts[5])
                elif parts[2] == "resolve":
                    commit, name = parts[3], "/".join(parts[4:])
                    if host == hub.url and name.endswith((".safetensors", ".npy")):
                        self._respond(302, b"", Location=(hub.redirect_to or hub.cdn) + self.path)
                    else:
                        self._send(hub.commits[commit][name])

            def _list(self, repository: str, revision: str) -> None:
                commit = hub.revisions.get((repository, revision))
                if hub.moved_to:
                    self._respond(307, b"", Location=f"/api/models/{hub.moved_to}/revision/main")
                elif commit is None:
                    self._respond(404, b'{"error": "secret details"}')
                elif hub.list_fault:
                    self._break_off(json.dumps(hub.listing(commit)).encode())
                else:
                    self._respond(200, json.dumps(hub.listing(commit)).encode() if hub.listed is None else hub.listed)

            def _break_off(self, body: bytes) -> None:
                self.send_response(200)
                if hub.list_fault == "chunk":
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                    self.wfile.write(b"%x\r\n" % len(body) + body[:20])
                    return
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                pieces = [body[:20]] if hub.list_fault == "reset" else [body[i : i + 1] for i in range(len(body))]
                with contextlib.suppress(ConnectionError):
                    for piece in pieces:
                        self.wfile.write(piece)
                        self.wfile.flush()
                if hub.list_fault == "reset":
                    linger = struct.pack("ii", 1, 0)
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    self.connection.close()

            def _send(self, data: bytes) -> None:
                fault = hub.faults.pop(0) if hub.faults else 200
                if isinstance(fault, int) and fault != 200:
                    self._respond(fault, b"", **_headers_of(fault))
                    return
                wanted, status = self.headers["Range"], 200
                more: dict[str, Any] = {}
                size, start = len(data), 0
                if wanted and fault != "whole":
                    start = int(wanted.removeprefix("bytes=").rstrip("-"))
                    status, more = 206, {"Content-Range": f"bytes {start}-{size - 1}/{size}"}
                body = data[start:]
                if fault == "damage":
                    body = bytes(len(body))
                self._respond(
                    status, body[: len(body) // 2] if fault in ("truncate", "hang") else body, len(body), **more
                )
                if fault == "hang":
                    hub.sent.set()
                    hub.released.wait(30)

            def _respond(self, status: int, body: bytes, length: int | None = None, **headers: str) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body) if length is None else length))
                self.end_headers()
                self.wfile.write(body)
                self.wfile.flush()

            def log_message(self, *_arguments: object) -> None: ...

        return Handler
