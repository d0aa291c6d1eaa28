"""The adapter registry of a server, for the blocking client. `asynchronous.py` is its twin."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet import calls
from motet.adapters import residency, rollouts
from motet.adapters.downloads import download_progress
from motet.adapters.push import AdapterPush, Tensors
from motet.adapters.watch import watch_request
from motet.types import (
    Adapter,
    AdapterCanary,
    AdapterEvent,
    AdapterTier,
    AdapterVersion,
    AdapterVisibility,
    PushedVersion,
    Residency,
    VersionRollout,
)
from motet.uploads import AdapterUpload, Progress

if TYPE_CHECKING:
    from motet.client import Client


class Adapters:
    """The adapter registry of a server: `client.adapters`. Names may be given with or without "adapters/"."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def register(
        self,
        name: str,
        directory: str | Path,
        *,
        display_name: str = "",
        labels: Mapping[str, str] | None = None,
        visibility: AdapterVisibility | str | None = None,
        shared_with: Sequence[str] = (),
        owner: str = "",
        rollout: VersionRollout | None = None,
        validate_only: bool = False,
        progress: Progress | None = None,
        timeout_s: float = 600.0,
    ) -> Adapter:
        """Upload a PEFT adapter directory. A known name gets a new version, which becomes the active one.

        `rollout` has other ways: the version is only stored, or becomes the canary, or gets labels.

        `progress(bytes sent, bytes in all)` is called from another thread, and starts again with every attempt. With
        `validate_only` nothing is stored.

        A new adapter belongs to the caller's tenant and is private. `visibility` and `shared_with` (tenants) say who
        else may use it; left out, they stay as they are. Only admins may name another `owner`.
        """
        upload = AdapterUpload(
            name,
            directory,
            display_name=display_name,
            labels=labels,
            visibility=visibility,
            shared_with=shared_with,
            owner=owner,
            rollout=rollout,
            validate_only=validate_only,
            progress=progress,
        )
        return self._client.upload(upload, timeout_s)

    def push(
        self,
        name: str,
        config: Mapping[str, Any] | str | bytes,
        tensors: Tensors,
        *,
        visibility: AdapterVisibility | str | None = None,
        shared_with: Sequence[str] = (),
        owner: str = "",
        hold: bool = False,
        validate_only: bool = False,
        signature: bytes = b"",
        files_from: str | int = "",
        without_files: bool = False,
        timeout_s: float = 600.0,
    ) -> PushedVersion:
        """Push an adapter from memory, as a training loop does after a step: no file is written.

        `config` is the content of adapter_config.json, or PEFT's `LoraConfig.to_dict()`. `tensors` are numpy or torch
        tensors by the names of PEFT's `get_peft_model_state_dict(model)`, or the content of
        adapter_model.safetensors. A known name gets a new version, which becomes the active one: new requests get it
        before this returns, requests that run keep theirs. On return it is durable. With `hold` it does not become
        active: `verify` it with `activate`. With `validate_only` nothing is registered.

        `signature` is the content of model.sig, for a server that demands signed adapters: sign a directory with the
        two files, and give their bytes as `config` and `tensors`.

        Tokenizer additions, chat template and generation defaults are kept from the version of `files_from`, a number,
        a label or a digest; from the active one if that is empty. With `without_files` the version has none of them.
        """
        push = AdapterPush(
            name,
            config,
            tensors,
            visibility=visibility,
            shared_with=shared_with,
            owner=owner,
            hold=hold,
            validate_only=validate_only,
            signature=signature,
            files_from=files_from,
            without_files=without_files,
        )
        return self._client.upload(push, timeout_s)

    def verify(
        self,
        name: str,
        digest: str = "",
        *,
        prompts: Sequence[Sequence[int]] = (),
        activate: bool = False,
        timeout_s: float = 1800.0,
    ) -> AdapterVersion:
        """Compare what is served of a version with merged float32 weights, and store the verdict with the version.

        An empty digest is the active version. `prompts`, lists of token ids, are compared beside those that the server
        draws. The result is in `verification`, also where it did not pass. With `activate` the version becomes the
        active one if it passed.
        """
        call = calls.verify_version(name, digest, prompts, activate=activate)
        operation = self._client.wait_operation(self._client.send(call), timeout_s)
        return calls.verified_version(operation)

    def register_from_root(
        self,
        name: str,
        source: str,
        *,
        display_name: str = "",
        labels: Mapping[str, str] | None = None,
        visibility: AdapterVisibility | str | None = None,
        shared_with: Sequence[str] = (),
        owner: str = "",
        rollout: VersionRollout | None = None,
        validate_only: bool = False,
        progress: Progress | None = None,
        timeout_s: float = 600.0,
    ) -> Adapter:
        """Register "{root}/{path}[@revision]": a directory, a repository on a Hub, or a place in a bucket.

        The server's operator lists the roots. Only repositories have revisions.

        `progress(bytes downloaded, bytes in all)` is called while this waits for a download; there is none from a
        directory. If `timeout_s` ends the wait, the registration goes on, and its operation is named in the error.
        """
        call = calls.create_adapter(
            name, source, display_name, labels, visibility, shared_with, owner, rollout, validate_only=validate_only
        )
        begun = self._client.send(call)
        operation = self._client.wait_operation(begun, timeout_s, download_progress(progress))
        return calls.adapter_of_operation(operation)

    def list(self, *, page_size: int = 100) -> Iterator[Adapter]:
        """All adapters that the caller sees, ordered by name, fetched a page at a time."""
        page_token = ""
        while True:
            page = self._client.send(calls.list_adapters(page_size, page_token))
            yield from page.items
            page_token = page.next_page_token
            if not page_token:
                return

    def versions(self, name: str, *, page_size: int = 100) -> Iterator[AdapterVersion]:
        """The versions of one adapter, newest first, fetched a page at a time."""
        page_token = ""
        while True:
            page = self._client.send(calls.list_versions(name, page_size, page_token))
            yield from page.items
            page_token = page.next_page_token
            if not page_token:
                return

    def get(self, name: str) -> Adapter:
        """One adapter, placements and target modules included."""
        return self._client.send(calls.get_adapter(name))

    def pin(self, name: str) -> Adapter:
        """Load the adapter into the host cache and onto the devices that have room, and keep it there."""
        return self._client.send(calls.pin_adapter(name))

    def unpin(self, name: str) -> Adapter:
        """Remove the pin."""
        return self._client.send(calls.unpin_adapter(name))

    def load(
        self,
        name: str,
        *,
        digest: str = "",
        tier: AdapterTier | str = AdapterTier.ARENA,
        worker_ids: Sequence[str] = (),
        wait_s: float = 30.0,
    ) -> tuple[Residency, ...]:
        """Bring a version into memory ahead of requests: into the host cache, or into the arenas of workers.

        Waits at most `wait_s` for it, and returns what became of each place. `name` may be "NAME@NUMBER" or
        "NAME@LABEL". Nothing that requests use or wait for, and nothing pinned, leaves for it. Only admins may name
        `worker_ids`; without them all workers load it.
        """
        return self._client.send(
            residency.load_adapter(name, digest, tier, worker_ids, wait_s), wait_s + residency.CALL_S
        )

    def unload(
        self,
        name: str,
        *,
        digest: str = "",
        tier: AdapterTier | str = AdapterTier.ARENA,
        worker_ids: Sequence[str] = (),
        wait_s: float = 30.0,
    ) -> tuple[Residency, ...]:
        """Take a version out of the host cache or out of arenas; for admins. Returns what became of each place.

        Requests that use the version finish first; the call waits at most `wait_s` for them. A new request brings the
        version back.
        """
        return self._client.send(
            residency.unload_adapter(name, digest, tier, worker_ids, wait_s), wait_s + residency.CALL_S
        )

    def watch(
        self, name: str = "", *, resume_token: str = "", with_residency: bool = False, timeout_s: float = math.inf
    ) -> Iterator[AdapterEvent]:
        """Changes of one adapter, or of all that the caller sees: RESYNC, a snapshot, SYNCED, then events in order.

        Goes on after a break where it was. Where the server does not know what was missed, RESYNC comes again: forget
        what you know. `resume_token` is that of the last event that an earlier watch gave.
        """
        request = watch_request(name, resume_token, with_residency=with_residency)
        yield from self._client.watch(request, timeout_s)

    def activate(self, name: str, digest: str, *, etag: str = "", expected_digest: str = "") -> Adapter:
        """Make a registered version the one that new requests get. Where it is the canary, that ends.

        With `expected_digest`, only if that version is active at present; Aborted otherwise.
        """
        return self._client.send(calls.activate_version(name, digest, etag, expected_digest))

    def roll_back(self, name: str, *, etag: str = "", expected_digest: str = "") -> Adapter:
        """Make the version active that was active before: the first of `previous_digests`.

        With `expected_digest`, only if that version is active at present; Aborted otherwise.
        """
        return self._client.send(rollouts.roll_back(name, etag, expected_digest))

    def set_canary(self, name: str, canary: AdapterCanary | None, *, etag: str = "") -> Adapter:
        """Give a version a share of the new requests that name no version; None ends that."""
        return self._client.send(rollouts.set_canary(name, canary, etag))

    def set_label(self, name: str, label: str, digest: str | None) -> Adapter:
        """Let a label point to a version, so that requests may name "NAME@LABEL"; None removes the label.

        Aborted if somebody else changed the adapter in the same moment.
        """
        return self._client.send(rollouts.set_label(self.get(name), label, digest))

    def update(
        self,
        name: str,
        *,
        display_name: str | None = None,
        labels: Mapping[str, str] | None = None,
        visibility: AdapterVisibility | str | None = None,
        shared_with: Sequence[str] | None = None,
        owner: str | None = None,
        version_labels: Mapping[str, str] | None = None,
        keep_versions: int | None = None,
        expire_time: datetime | None = None,
        ttl_s: float | None = None,
        never_expires: bool = False,
        etag: str = "",
    ) -> Adapter:
        """Change what is not None. `labels` replaces all labels, and `shared_with` all tenants of it.

        A visibility other than "shared" empties `shared_with`. Only admins may change the `owner`. `version_labels`
        (label to digest) replaces all of them, `keep_versions` of 0 keeps all versions. At `expire_time`, or after
        `ttl_s`, the server deletes the adapter.
        """
        add_more = partial(
            rollouts.set_rollout,
            version_labels=version_labels,
            keep_versions=keep_versions,
            expire_time=expire_time,
            ttl_s=ttl_s,
            never_expires=never_expires,
        )
        return self._client.send(
            calls.update_adapter(name, display_name, labels, visibility, shared_with, owner, etag, add_more)
        )

    def delete(self, name: str, *, etag: str = "", wait: bool = True, timeout_s: float = 600.0) -> None:
        """Delete an adapter. Running streams finish. With `wait`, return when every tier is cleared."""
        operation = self._client.send(calls.delete_adapter(name, etag))
        if wait:
            self._client.wait_operation(operation, timeout_s)

    def delete_version(
        self, name: str, digest: str, *, etag: str = "", wait: bool = True, timeout_s: float = 600.0
    ) -> None:
        """Delete a version that is not the active one. Running streams finish. `wait` works as in delete()."""
        operation = self._client.send(calls.delete_version(name, digest, etag))
        if wait:
            self._client.wait_operation(operation, timeout_s)
