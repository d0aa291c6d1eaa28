"""vLLM's routes that load and unload adapters, under keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from contract.ids import ADAPTER_ID_FORM
from control_plane.access.authentication.grants import Grant
from control_plane.access.authentication.key_file import change_keys, new_key
from control_plane.access.principal import Role
from tests.e2e.harness import System
from tests.gateway.gateway_process import Gateway
from tests.gateway.openai.conftest import WAIT_S
from tests.makers import make_adapter, make_checkpoint
from tests.secret_scan import SCAN

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Locked:
    """A system with keys, of one who may write adapters and of two who may not, and a root `team` with `legal`."""

    def __init__(self, gateway: Gateway, writer: str, reader: str, user: str) -> None:
        self.gateway = gateway
        self.writer = writer
        self.reader = reader
        self.user = user  # may generate only

    def post(self, path: str, body: dict[str, Any], key: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.post(f"{self.gateway.url}{path}", json=body, headers=headers, timeout=WAIT_S)

    def models(self, key: str) -> list[str]:
        with openai.OpenAI(base_url=f"{self.gateway.url}/v1", api_key=key, max_retries=0, timeout=WAIT_S) as api:
            return [model.id for model in api.models.list()]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    directory = tmp_path_factory.mktemp("loras")
    checkpoint = make_checkpoint(directory / "model", arch="llama")
    make_adapter(directory / "root" / "legal", checkpoint, rank=4, targets=["q_proj"], seed=1)
    (writer, key), (reader, lesser), (user, least) = (
        new_key(set(), Grant(tenants=(tenant,), roles=roles, adapters=("*",)))
        for tenant, roles in (
            ("acme", (Role.ADMIN, Role.INFER, Role.ADAPTERS_READ, Role.ADAPTERS_WRITE)),
            ("other", (Role.INFER, Role.ADAPTERS_READ)),
            ("third", (Role.INFER,)),
        )
    )
    change_keys(directory / "keys.json", lambda _: (writer, reader, user), may_create=True)
    SCAN.plant("a key", key)
    SCAN.plant("another key", lesser)
    SCAN.plant("a third key", least)
    flags = ["--api-keys", str(directory / "keys.json"), "--adapter-root", f"team={directory / 'root'}"]
    with System(checkpoint, directory, control_flags=flags) as system:
        system.start_hash_worker()
        with Gateway(system.address, directory, ["--server-absence-s", "2"]) as gateway:
            yield Locked(gateway, key, lesser, least)


@pytest.mark.parametrize("may_read", [True, False])
def test_who_may_not_load_reads_which_role_is_needed(locked: Locked, may_read: bool) -> None:
    body = {"lora_name": "legal", "lora_path": "team/legal"}
    refused = locked.post(LOAD, body, locked.reader if may_read else locked.user)
    assert refused.status_code == 403 and "'admin'" in refused.json()["error"]["message"]


def test_an_adapter_is_loaded_from_a_root_and_unloaded(locked: Locked) -> None:
    body = {"lora_name": "legal", "lora_path": "team/legal"}
    loaded = locked.post(LOAD, body, locked.writer)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'legal' added successfully.")
    assert "legal" in locked.models(locked.writer)
    assert "legal" not in locked.models(locked.reader), "it is another tenant's"
    again = locked.post(LOAD, {**body, "load_inplace": None}, locked.writer)
    assert again.status_code == 400 and again.json()["error"]["param"] == "lora_name"
    assert locked.post(LOAD, {**body, "load_inplace": True}, locked.writer).status_code == 200
    assert locked.post(UNLOAD, {"lora_name": "legal"}, locked.reader).status_code in (403, 404)
    assert "legal" in locked.models(locked.writer)
    unloaded = locked.post(UNLOAD, {"lora_name": "legal"}, locked.writer)
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'legal' removed successfully.")
    assert "legal" not in locked.models(locked.writer)
    gone = locked.post(UNLOAD, {"lora_name": "legal"}, locked.writer)
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "lora_name")


@pytest.mark.parametrize(
    "path", ["/etc", "../root/legal", "team/../../etc", "hf://acme/legal", "https://example.com/a", "nobody/legal", ""]
)
def test_a_place_outside_the_roots_is_refused(locked: Locked, path: str) -> None:
    refused = locked.post(LOAD, {"lora_name": "escape", "lora_path": path}, locked.writer)
    assert refused.status_code == 403 and "escape" not in locked.models(locked.writer), refused.text


@pytest.mark.parametrize("body", [{"lora_name": "A B"}, {"lora_name": "a/b"}, {"lora_name": "a@1"}, {"lora_int_id": 1}])
def test_a_name_that_cannot_be_one_is_refused(locked: Locked, body: dict[str, Any]) -> None:
    for path, more in ((LOAD, {"lora_path": "team/legal"}), (UNLOAD, {})):
        refused = locked.post(path, {**body, **more}, locked.writer)
        assert refused.status_code == 400
        if "lora_name" in body:
            assert ADAPTER_ID_FORM in refused.json()["error"]["message"]
            assert refused.json()["error"]["param"] == "lora_name"


def test_the_message_about_a_place_has_its_name_once(locked: Locked) -> None:
    refused = locked.post(LOAD, {"lora_name": "absent", "lora_path": "team/absent"}, locked.writer)
    error = refused.json()["error"]
    assert error["param"] == "lora_path" and "source:" not in error["message"], error


def test_a_role_that_may_not_write_is_403(locked: Locked) -> None:
    body = {"lora_name": "mine", "lora_path": "team/legal"}
    assert locked.post(LOAD, body, locked.reader).status_code == 403


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "model", "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"model": "model", "prompt": [1]}),
        ("/v1/completions", {"model": "model", "prompt": [1], "stream": True}),
        ("/v1/embeddings", {"model": "model", "input": [1]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        (LOAD, {"lora_name": "x", "lora_path": "team/legal"}),
        (UNLOAD, {"lora_name": "x"}),
    ],
)
def test_every_route_needs_a_key(locked: Locked, path: str, body: dict[str, Any]) -> None:
    for key in ("", f"{locked.writer[:-3]}abc"):
        response = locked.post(path, body, key)
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert locked.writer[:-3] not in response.text
