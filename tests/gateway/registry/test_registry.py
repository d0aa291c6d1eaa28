"""The registry over HTTP, with and without the roles for it, and the document's commands as they are printed."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from control_plane.access.authentication.grants import Grant
from control_plane.access.authentication.key_file import change_keys, new_key
from control_plane.access.principal import Role
from tests.docs_commands import block, run
from tests.e2e.harness import System
from tests.gateway.gateway_process import Gateway
from tests.makers import make_adapter, make_checkpoint
from tests.secret_scan import SCAN

WAIT_S = 120.0
URL = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Registry:
    """A gateway before a server with keys: `admin` may do everything, `reader` of another tenant may read."""

    gateway: Gateway
    directory: Path
    admin: str
    reader: str

    def send(self, method: str, path: str, *, key: str | None = None, **more: Any) -> httpx.Response:
        key = self.admin if key is None else key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.request(method, f"{self.gateway.url}{path}", headers=headers, timeout=WAIT_S, **more)

    def upload(self, settings: Any, adapter: str = "legal", **more: Any) -> httpx.Response:
        directory = self.directory / adapter
        files = [
            ("files", (name, (directory / name).read_bytes()))
            for name in ("adapter_config.json", "adapter_model.safetensors")
        ]
        text = settings if isinstance(settings, str) else json.dumps(settings)
        return self.send("POST", "/v1/adapters", files=[*files, ("settings", (None, text))], **more)

    def ended(self, operation: dict[str, Any]) -> dict[str, Any]:
        """The operation, once it is done."""
        deadline_s = time.monotonic() + WAIT_S
        while not operation["done"]:
            assert time.monotonic() < deadline_s
            operation = self.send("GET", f"/v1/{operation['name']}").json()
        return operation


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    directory = tmp_path_factory.mktemp("registry")
    checkpoint = make_checkpoint(directory / "model", arch="llama")
    for seed, name in enumerate(("legal", "newer")):
        make_adapter(directory / name, checkpoint, rank=4, targets=["q_proj"], seed=seed)
    (writer, key), (reader, lesser) = (
        new_key(set(), Grant(tenants=(tenant,), roles=roles, adapters=("*",)))
        for tenant, roles in (("acme", tuple(Role)), ("other", (Role.INFER, Role.ADAPTERS_READ)))
    )
    change_keys(directory / "keys.json", lambda _: (writer, reader), may_create=True)
    SCAN.plant("a key", key)
    SCAN.plant("another key", lesser)
    flags = ["--api-keys", str(directory / "keys.json"), "--adapter-root", f"team={directory}"]
    (directory / "uploads").mkdir()
    uploads = ["--upload-dir", str(directory / "uploads"), "--max-upload-bytes", "128MiB", "--max-uploads", "2"]
    with System(checkpoint, directory, control_flags=flags) as system:
        system.start_hash_worker()
        with Gateway(system.address, directory, ["--server-absence-s", "2", *uploads]) as gateway:
            yield Registry(gateway, directory, key, lesser)


def test_the_commands_of_the_document_run_as_they_are_printed(registry: Registry, tmp_path: Path) -> None:
    shutil.copytree(registry.directory / "legal", tmp_path / "adapter")
    text = block("docs/registry.md", "registry").replace(URL, registry.gateway.url)
    run(f"KEY={registry.admin}\n{text}", tmp_path)
    made = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert made["registered"]["id"] == "contracts" and made["registered"]["labels"] == {"team": "law"}
    assert made["registered"]["registration"]["change"] == "created"
    assert "contracts" in [each["id"] for each in made["adapters"]["adapters"]]
    [version] = made["versions"]["versions"]
    assert made["labelled"]["version_labels"] == {"stable": version["digest"]}
    assert made["pinned"]["pinned"] is True
    assert registry.ended(made["operation"])["error"] is None
    assert registry.send("GET", "/v1/adapters/contracts").status_code == 404


def test_versions_are_registered_activated_labelled_and_deleted(registry: Registry) -> None:
    first = registry.upload({"name": "steps"}).json()
    second = registry.upload({"name": "steps", "rollout": {"keep_active": True, "version_labels": ["next"]}}, "newer")
    assert second.status_code == 200, second.text
    old, new = first["active_version"]["digest"], second.json()["version_labels"]["next"]
    path = "/v1/adapters/steps"
    assert registry.send("GET", path).json()["active_version"]["digest"] == old
    canary = registry.send("PUT", f"{path}/canary", json={"digest": new, "per_mille": 100})
    assert canary.json()["canary"] == {"digest": new, "per_mille": 100}
    assert registry.send("DELETE", f"{path}/canary").json()["canary"] is None
    late = registry.send("POST", f"{path}/activate", json={"digest": new, "expected_digest": new})
    assert late.status_code == 409 and late.headers["x-should-retry"] == "false"
    active = registry.send("POST", f"{path}/activate", json={"digest": new, "expected_digest": old}).json()
    assert active["active_version"]["digest"] == new and active["previous_digests"] == [old]
    assert registry.send("POST", f"{path}/rollback", json={}).json()["active_version"]["digest"] == old
    assert registry.send("DELETE", f"{path}/labels/next").json()["version_labels"] == {}
    deleted = registry.send("DELETE", f"{path}/versions/{new}")
    assert deleted.status_code in (200, 202) and registry.ended(deleted.json())["done"]
    assert [each["digest"] for each in registry.send("GET", f"{path}/versions").json()["versions"]] == [old]
    refused = registry.send("DELETE", f"{path}/versions/{old}")
    assert refused.status_code == 409, "the active one"


def test_adapters_come_in_pages(registry: Registry) -> None:
    for number in range(3):
        assert registry.upload({"name": f"paged-{number}"}).status_code == 200
    token, names, sizes = "", list[str](), list[int]()
    while True:
        page = registry.send("GET", "/v1/adapters", params={"page_size": "2", "page_token": token}).json()
        names += [each["id"] for each in page["adapters"]]
        sizes.append(len(page["adapters"]))
        if not (token := page["next_page_token"]):
            break
    assert names == sorted(names) and {"paged-0", "paged-1", "paged-2"} <= set(names) and max(sizes) == 2
    for size in ("0", "1001", "-1", "x", "²"):
        refused = registry.send("GET", "/v1/adapters", params={"page_size": size})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "page_size"
    for path, message in (
        ("/v1/adapters?size=2", "size: is not a parameter of this route; give page_size or page_token"),
        ("/v1/adapters/legal?size=2", "size: is not a parameter of this route; this route has none"),
    ):
        refused = registry.send("GET", path)
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, message)
    empty = registry.send("POST", "/v1/adapters/legal/load")
    assert empty.status_code == 400
    assert empty.json()["error"]["message"] == (
        "the body is not valid: it is empty; send a JSON object, {} if no field is to be set"
    )


def test_an_adapter_is_changed_loaded_pinned_and_unloaded(registry: Registry) -> None:
    registry.upload({"name": "moved"})
    path = "/v1/adapters/moved"
    changed = registry.send("PATCH", path, json={"display_name": "Moved", "keep_versions": 3, "visibility": "public"})
    assert (changed.json()["display_name"], changed.json()["visibility"]) == ("Moved", "public")
    assert registry.send("PATCH", path, json={"display_name": "x", "etag": "stale"}).status_code == 409
    [loaded] = registry.send("POST", f"{path}/load", json={}).json()["results"]
    assert loaded["outcome"] in ("loaded", "was_loaded"), "registering loads it, too"
    assert registry.send("POST", f"{path}/pin").json()["pinned"]
    assert not registry.send("POST", f"{path}/unpin").json()["pinned"]
    [unloaded] = registry.send("POST", f"{path}/unload", json={"tier": "arena"}).json()["results"]
    assert unloaded["tier"] == "arena"
    assert registry.send("POST", f"{path}/load", json={"tier": "moon"}).status_code == 400
    hasty = registry.send("POST", f"{path}/load", json={"wait_s": -1e9})
    assert hasty.status_code == 400 and hasty.json()["error"]["param"] == "wait"


def test_a_place_of_the_operator_is_registered_as_an_operation(registry: Registry) -> None:
    begun = registry.send("POST", "/v1/adapters", json={"name": "rooted", "source": "team/legal"})
    assert begun.status_code in (200, 202), begun.text
    assert registry.ended(begun.json())["adapter"]["id"] == "rooted"
    missing = registry.send("POST", "/v1/adapters", json={"name": "rooted", "source": "team/nothing"})
    error = registry.ended(missing.json())["error"] if missing.status_code < 300 else missing.json()["error"]
    assert "nothing" in error["message"]
    assert registry.send("GET", f"/v1/operations/{'0' * 32}").status_code == 404
    assert registry.send("GET", "/v1/operations/x").status_code == 400


def test_a_role_that_is_missing_and_another_tenants_adapter_are_as_over_grpc(registry: Registry) -> None:
    registry.upload({"name": "private"})
    assert registry.send("GET", "/v1/adapters/private", key=registry.reader).status_code == 404
    names = [each["id"] for each in registry.send("GET", "/v1/adapters", key=registry.reader).json()["adapters"]]
    assert "private" not in names
    for method, path, body in (
        ("POST", "/v1/adapters/private/pin", None),
        ("POST", "/v1/adapters/private/unload", {}),
        ("DELETE", "/v1/adapters/private", None),
        ("POST", "/v1/adapters", {"name": "a", "source": "team/legal"}),
    ):
        refused = registry.send(method, path, key=registry.reader, json=body)
        assert refused.status_code == 403, (path, refused.text)
        nobody = registry.send(method, path, key="", json=body)
        assert nobody.status_code == 401 and nobody.json()["error"]["code"] == "unauthenticated", nobody.text


def test_an_upload_without_the_role_is_refused_before_it_is_read(registry: Registry) -> None:
    refused = registry.upload({"name": "mine"}, key=registry.reader)
    assert refused.status_code == 403 and not list((registry.directory / "uploads").iterdir())
    assert registry.upload({"name": "mine"}, key="").status_code == 401


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ("{", "settings"),
        ({}, "settings"),
        ({"name": "a", "colour": "red"}, "settings"),
        ({"name": "A B"}, "header.adapter_id"),
        ({"name": "a", "rollout": {"canary_per_mille": 5000}}, "header.rollout.canary_per_mille"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(registry: Registry, settings: Any, param: str) -> None:
    refused = registry.upload(settings)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param


def test_a_directory_as_peft_writes_it_is_an_upload(registry: Registry) -> None:
    """`save_pretrained` writes a README.md, too, and `-F files=@...` for each file sends it."""
    directory = registry.directory / "legal"
    (directory / "README.md").write_text("# Model card\n")
    files = [("files", (path.name, path.read_bytes())) for path in sorted(directory.iterdir())]
    settings = ("settings", (None, json.dumps({"name": "whole", "validate_only": True})))
    assert {"README.md", "adapter_config.json"} <= {name for _, (name, _) in files}
    validated = registry.send("POST", "/v1/adapters", files=[*files, settings])
    assert validated.status_code == 200, validated.text


def test_a_refused_upload_names_its_files_and_no_place_of_the_gateway(registry: Registry) -> None:
    readme = ("files", ("README.md", b"x"))
    refused = registry.send("POST", "/v1/adapters", files=[readme, ("settings", (None, '{"name": "empty"}'))])
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "files", "adapter_invalid"), error
    assert error["message"].startswith("files: the upload has no adapter_config.json")
    assert str(registry.directory) not in error["message"] and "motet-upload" not in error["message"]


def test_what_is_no_form_is_refused(registry: Registry) -> None:
    part = b'--b\r\ncontent-disposition: form-data; name="%s"; filename="%s"\r\n\r\nx\r\n--b--\r\n'
    form = {"content-type": "multipart/form-data; boundary=b", "authorization": f"Bearer {registry.admin}"}
    for content, said in (
        (b"no form", "not multipart/form-data"),
        (b"", "ends before its last boundary"),
        (part[:-8] % (b"settings", b""), "ends before its last boundary"),
        (part % (b"files", b"../../etc/passwd"), "is not a file of an adapter"),
        (part % (b"files", b"adapter_model.bin"), "is not a file of an adapter"),
        (part % (b"other", b"a"), "is unknown"),
        (part % (b"files", b"adapter_config.json"), "settings: is missing"),
        (b"--b\r\n" + b"x-long: " + b"a" * 8192 + b"\r\n\r\n\r\n--b--\r\n", "Maximum header size exceeded"),
        (b'--b\r\ncontent-disposition: form-data; name="settings"\r\n\r\n' + b" " * 300_000, "is longer than 262144"),
    ):
        refused = httpx.post(f"{registry.gateway.url}/v1/adapters", content=content, headers=form, timeout=WAIT_S)
        assert refused.status_code == 400 and said in refused.json()["error"]["message"], refused.text
    wrong = registry.send("POST", "/v1/adapters", content=b"x")
    assert wrong.status_code == 415
    twice = [("files", ("adapter_config.json", b"{}")), ("files", ("adapter_config.json", b"{}"))]
    assert "comes twice" in registry.send("POST", "/v1/adapters", files=twice).text
    assert not list((registry.directory / "uploads").iterdir())


def test_an_upload_is_never_whole_in_memory_and_leaves_nothing_behind(registry: Registry) -> None:
    process = psutil.Process(registry.gateway.process.pid)
    (Path(f"/proc/{process.pid}") / "clear_refs").write_text("5")  # the peak starts anew
    before = process.memory_info().rss
    weights = b"\xff" * (96 << 20)
    files = [
        ("settings", (None, json.dumps({"name": "large"}))),
        ("files", ("adapter_config.json", (registry.directory / "legal" / "adapter_config.json").read_bytes())),
        ("files", ("adapter_model.safetensors", weights)),
    ]
    refused = registry.send("POST", "/v1/adapters", files=files)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "adapter_invalid", refused.text
    [peak] = [
        int(line.split()[1]) << 10
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    assert peak - before < len(weights) // 3
    assert not list((registry.directory / "uploads").iterdir())
    too_long = registry.send(
        "POST", "/v1/adapters", files=[("files", ("adapter_config.json", weights + weights[: 40 << 20]))]
    )
    assert too_long.status_code == 413
