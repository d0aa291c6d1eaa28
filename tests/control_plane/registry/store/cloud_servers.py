"""The parts of Google Cloud Storage's XML protocol and of Azure's blob protocol that obstore uses, on this machine.

Written by the documents of both services: what a condition that fails gives, pages of a list, uploads in parts. Lists
of Google have no generations, those of Azure no quotes around an ETag; Azure deletes in batches.
"""

from __future__ import annotations

import contextlib
import email
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from tests.control_plane.registry.store.cloud_objects import (
    CloudObjects,
    Request,
    Response,
    StoredObject,
    content_response,
)

BUCKET, ACCOUNT = "bucket", "account"
PAGE = 1000
_uploads = itertools.count(1)


def google(objects: CloudObjects, request: Request) -> Response:
    """Google Cloud Storage, XML."""
    bucket, _, key = request.path.removeprefix("/").partition("/")
    if bucket != BUCKET:
        return Response(404, body=b"<Error><Code>NoSuchBucket</Code></Error>")
    query, found = request.query, objects.get(key)
    if not key:
        return _google_list(objects, query)
    match request.method:
        case "GET" | "HEAD":
            if found is None:
                return Response(404, body=b"<Error><Code>NoSuchKey</Code></Error>")
            if request.headers.get("if-match", f'"{found.md5}"') != f'"{found.md5}"':
                return Response(412, body=b"<Error><Code>PreconditionFailed</Code></Error>")
            return content_response(found, request, _google_headers(found))
        case "DELETE":
            return Response(204 if objects.delete(key) else 404)
        case "POST" if "uploads" in query:
            upload = f"<UploadId>{next(_uploads)}</UploadId>"
            return _xml(f"<InitiateMultipartUploadResult>{upload}</InitiateMultipartUploadResult>")
        case "PUT" if "partNumber" in query:
            objects.put_part(query["uploadId"], query["partNumber"], request.body)
            return Response(200, {"ETag": f'"{query["partNumber"]}"'})
        case "POST":
            numbers = re.findall(r"<PartNumber>(\d+)</PartNumber>", request.body.decode())
            written = objects.complete(key, query["uploadId"], numbers)
            done = _xml(f"<CompleteMultipartUploadResult><ETag>{written.md5}</ETag></CompleteMultipartUploadResult>")
            return Response(200, done.headers | _google_headers(written), done.body)
        case "PUT":
            wanted = request.headers.get("x-goog-if-generation-match")
            if wanted is not None and int(wanted) != (0 if found is None else found.generation):
                return Response(412, body=b"<Error><Code>PreconditionFailed</Code></Error>")
            return Response(200, _google_headers(objects.put(key, request.body)))
    return Response(405)


def _google_headers(found: StoredObject) -> dict[str, str]:
    return {"ETag": f'"{found.md5}"', "x-goog-generation": str(found.generation)}


def _google_list(objects: CloudObjects, query: dict[str, str]) -> Response:
    page = objects.page(query.get("prefix", ""), query.get("delimiter", ""), query.get("continuation-token", ""), PAGE)
    items = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>{_iso(found)}</LastModified>"
        f'<ETag>"{found.md5}"</ETag><Size>{len(found.content)}</Size></Contents>'
        for key, found in page.objects
    )
    items += "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in page.prefixes)
    token = f"<NextContinuationToken>{escape(page.marker)}</NextContinuationToken>" if page.marker else ""
    return _xml(f"<ListBucketResult>{items}{token}</ListBucketResult>")


def azure(objects: CloudObjects, request: Request) -> Response:
    """Azure's blob service."""
    query, (container, _, key) = request.query, request.path.removeprefix("/").partition("/")
    if container != BUCKET:
        return _azure_error(404, "ContainerNotFound")
    if "x-ms-date" not in request.headers and "date" not in request.headers:
        return _azure_error(400, "MissingRequiredHeader")
    if query.get("comp") == "batch":
        return _azure_batch(objects, request)
    if query.get("comp") == "list":
        return _azure_list(objects, query)
    found = objects.get(key)
    match request.method:
        case "GET" | "HEAD":
            if found is None:
                return _azure_error(404, "BlobNotFound")
            if request.headers.get("if-match", _azure_tag(found)) != _azure_tag(found):
                return _azure_error(412, "ConditionNotMet")
            return content_response(found, request, {"ETag": _azure_tag(found), "x-ms-blob-type": "BlockBlob"})
        case "PUT" if query.get("comp") == "block":
            objects.put_part(key, query["blockid"], request.body)
            return Response(201)
    if request.method != "PUT":
        return _azure_error(405, "UnsupportedHttpVerb")
    if request.headers.get("if-none-match") == "*" and found is not None:
        return _azure_error(409, "BlobAlreadyExists")
    if "if-match" in request.headers and (found is None or request.headers["if-match"] != _azure_tag(found)):
        return _azure_error(412, "ConditionNotMet")
    if query.get("comp") == "blocklist":
        blocks = re.findall(r"<(?:Latest|Uncommitted)>([^<]+)</", request.body.decode())
        written = objects.complete(key, key, blocks)
    elif request.headers.get("x-ms-blob-type") == "BlockBlob":
        written = objects.put(key, request.body)
    else:
        return _azure_error(400, "MissingRequiredHeader")
    return Response(201, {"ETag": _azure_tag(written), "Last-Modified": written.date})


def _azure_tag(found: StoredObject) -> str:
    return f'"0x{found.generation:X}"'


def _azure_error(status: int, code: str) -> Response:
    return Response(status, {"x-ms-error-code": code}, f"<Error><Code>{code}</Code></Error>".encode())


def _azure_list(objects: CloudObjects, query: dict[str, str]) -> Response:
    page = objects.page(query.get("prefix", ""), query.get("delimiter", ""), query.get("marker", ""), PAGE)
    items = "".join(
        f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{found.date}</Last-Modified>"
        f"<Content-Length>{len(found.content)}</Content-Length><Content-Type>application/octet-stream</Content-Type>"
        f"<Etag>0x{found.generation:X}</Etag></Properties></Blob>"
        for key, found in page.objects
    )
    items += "".join(f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>" for name in page.prefixes)
    marker = f"<NextMarker>{escape(page.marker)}</NextMarker>" if page.marker else "<NextMarker />"
    return _xml(f"<EnumerationResults><Blobs>{items}</Blobs>{marker}</EnumerationResults>")


def _azure_batch(objects: CloudObjects, request: Request) -> Response:
    """Deletions, each a part of its own."""
    head = f"Content-Type: {request.headers['content-type']}\r\n\r\n".encode()
    parts = email.message_from_bytes(head + request.body).get_payload()
    assert isinstance(parts, list)
    results = []
    for part in parts:
        assert isinstance(part, email.message.Message)
        line = str(part.get_payload()).lstrip().splitlines()[0]
        method, target, _ = line.split(" ")
        assert method == "DELETE", line
        path = Request(method, target, {}, b"").path
        is_gone = objects.delete(path.removeprefix(f"/{BUCKET}/"))
        status = "202 Accepted" if is_gone else "404 The specified blob does not exist."
        code = "" if is_gone else "x-ms-error-code: BlobNotFound\r\n"
        results.append(
            f"--batch\r\nContent-Type: application/http\r\nContent-ID: {part['Content-ID']}\r\n\r\n"
            f"HTTP/1.1 {status}\r\n{code}x-ms-version: 2023-11-03\r\n\r\n"
        )
    return Response(
        202, {"Content-Type": "multipart/mixed; boundary=batch"}, ("".join(results) + "--batch--\r\n").encode()
    )


def _iso(found: StoredObject) -> str:
    return datetime.fromtimestamp(found.modified_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _xml(text: str) -> Response:
    content = f'<?xml version="1.0" encoding="utf-8"?>{text}'.encode()
    return Response(200, {"Content-Type": "application/xml"}, content)


@contextmanager
def served(service: Callable[[CloudObjects, Request], Response]) -> Iterator[str]:
    """The URL of a server on this machine with one bucket."""
    objects = CloudObjects()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def handle_one(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(headers.get("content-length", 0)))
            with objects.lock:
                response = service(objects, Request(self.command, self.path, headers, body))
            self.send_response(response.status)
            content = b"" if self.command == "HEAD" else response.body
            for name, value in ({"Content-Length": str(len(content))} | response.headers).items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the client has left
                self.wfile.write(content)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_one  # noqa: N815 - names of the library

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def google_server(directory: Path) -> Iterator[str]:
    """The URL of a new bucket, which the environment leads to. `directory` takes the service account's file."""
    with served(google) as url, pytest.MonkeyPatch.context() as patch:
        account = {
            "gcs_base_url": url,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        (directory / "google.json").write_text(json.dumps(account))
        patch.setenv("GOOGLE_SERVICE_ACCOUNT", str(directory / "google.json"))
        patch.setenv("GOOGLE_ALLOW_HTTP", "true")
        yield f"gs://{BUCKET}/adapters-of-tests"


@contextmanager
def azure_server() -> Iterator[str]:
    """As `google_server`, of Azure."""
    with served(azure) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
        patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
        patch.setenv("AZURE_STORAGE_ENDPOINT", url)
        patch.setenv("AZURE_ALLOW_HTTP", "true")
        yield f"az://{BUCKET}/adapters-of-tests"
