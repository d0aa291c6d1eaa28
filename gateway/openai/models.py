"""What `model` names: the base model, an adapter, or one version of it. Nothing else is ever served in its place.

NAME                    a name of the base model, else the adapter of this name
BASE:ADAPTER            the adapter, with a name of the base model before it
ADAPTER@NUMBER          that version, as `motet adapters versions` numbers them
ADAPTER@LABEL           the version that the label points to
ADAPTER@DIGEST          the version of that digest; its first 12 hexadecimal digits are enough
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from motet import Adapter, AsyncClient

from contract.ids import is_adapter_id, is_version_selector
from gateway.openai.errors import unknown_model

_DIGEST_PREFIX = re.compile(r"[0-9a-f]{12,64}")
MAX_LISTED = 1000
# How long the base model's name is kept. A request for it names the fingerprint too, so that another model, which was
# started at the same address meanwhile, refuses it.
KEPT_S = 2.0


@dataclass(frozen=True, slots=True)
class Source:
    """What a request is served with; the base model if `adapter` is empty."""

    adapter: str = ""  # also "name@number" or "name@label"
    digest: str = ""
    fingerprint: str = ""  # of the base model, where its name may be of a moment ago


class Models:
    """Names of models. `base_names` are the operator's, beside the checkpoint's own."""

    def __init__(self, base_names: tuple[str, ...], clock: Callable[[], float] = time.monotonic) -> None:
        self._base_names = base_names
        self._clock = clock
        self._kept = ("", "", -KEPT_S)  # name and fingerprint of the base model, and when they were read

    async def resolve(self, model: str, client: AsyncClient, *, is_checked: bool = False) -> Source:
        """What a name stands for. Raises Refusal 404 for a name that cannot be one, MotetError.

        `is_checked`: the caller lets the server check the fingerprint, so the name may be of a moment ago.
        """
        name, fingerprint = await self._base_of(client, is_checked=is_checked)
        names = [*self._base_names, name]
        if model in names:
            return Source(fingerprint="" if model in self._base_names else fingerprint)
        for name in names:
            if model.startswith(f"{name}:"):
                model = model.removeprefix(f"{name}:")
                break
        adapter, at, version = model.partition("@")
        if not is_adapter_id(adapter) or (at and not (is_version_selector(version) or _is_digest(version))):
            raise unknown_model(model)
        if _is_digest(version):
            return await _of_digest(adapter, version, client)
        return Source(model)

    async def _base_of(self, client: AsyncClient, *, is_checked: bool) -> tuple[str, str]:
        """Name and fingerprint of the base model."""
        name, fingerprint, read_s = self._kept
        if not is_checked or self._clock() - read_s >= KEPT_S:
            model = (await client.status()).model
            name, fingerprint = model.name, model.fingerprint
            self._kept = name, fingerprint, self._clock()
        return name, fingerprint

    async def listed(self, client: AsyncClient, *, after: str, limit: int) -> dict[str, Any]:
        """The page of `/v1/models` behind the model `after`."""
        base = (await client.status()).model
        models = [_base(name, base.name, base.max_model_len) for name in [*self._base_names, base.name]]
        taken = {model["id"] for model in models}
        adapters = [each async for each in client.adapters.list() if each.active_version is not None]
        models += [self._of(each, base.name, base.max_model_len, taken) for each in adapters]
        if after:
            positions = [at for at, model in enumerate(models) if model["id"] == after]
            if not positions:
                raise unknown_model(after)
            models = models[positions[0] + 1 :]
        return {"object": "list", "data": models[:limit], "has_more": len(models) > limit}

    async def get(self, model: str, client: AsyncClient) -> dict[str, Any]:
        """One model. Raises Refusal 404."""
        source = await self.resolve(model, client)
        base = (await client.status()).model
        if not source.adapter:
            return _base(model, base.name, base.max_model_len)
        name, _, version = source.adapter.partition("@")
        adapter = await client.adapters.get(name)
        digest = source.digest or (await _digest_of(adapter, version, client))
        return {**self._of(adapter, base.name, base.max_model_len, set()), "id": model, "root": digest}

    def _of(self, adapter: Adapter, base: str, max_model_len: int, taken: set[str]) -> dict[str, Any]:
        parent = [*self._base_names, base][0]
        created = 0 if adapter.create_time is None else int(adapter.create_time.timestamp())
        return {
            "id": f"{parent}:{adapter.id}" if adapter.id in taken else adapter.id,
            "object": "model",
            "created": created,
            "owned_by": adapter.owner or "motet",
            "root": "" if adapter.active_version is None else adapter.active_version.digest,
            "parent": parent,
            "max_model_len": max_model_len or None,
        }


def _base(name: str, checkpoint: str, max_model_len: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "motet",
        "root": checkpoint,
        "parent": None,
        "max_model_len": max_model_len or None,
    }


def _is_digest(version: str) -> bool:
    return _DIGEST_PREFIX.fullmatch(version) is not None


async def _of_digest(name: str, prefix: str, client: AsyncClient) -> Source:
    adapter = await client.adapters.get(name)
    if prefix in adapter.version_labels:
        return Source(f"{name}@{prefix}")
    digests = [each.digest async for each in client.adapters.versions(name) if each.digest.startswith(prefix)]
    if len(digests) != 1:
        raise unknown_model(f"{name}@{prefix}", f"{len(digests)} versions of {name} have this digest")
    return Source(name, digests[0])


async def _digest_of(adapter: Adapter, version: str, client: AsyncClient) -> str:
    if not version:
        if adapter.active_version is None:
            raise unknown_model(adapter.id, "it has no active version at present")
        return adapter.active_version.digest
    if digest := adapter.version_labels.get(version):
        return digest
    async for known in client.adapters.versions(adapter.id):
        if str(known.number) == version:
            return known.digest
    raise unknown_model(f"{adapter.id}@{version}")
