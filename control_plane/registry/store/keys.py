"""Where each thing of the artifact store lies: see artifact_store.py. Ids and digests were checked before."""

from __future__ import annotations

from contract.ids import is_adapter_id, is_digest

RECORD_SUFFIX = ".json"
DELETING_SUFFIX = ".deleting"  # of records that an earlier version of Motet was deleting


def blob_prefix(digest: str) -> str:
    """Below it lie the files of a blob."""
    assert is_digest(digest), "digests are checked before they reach the store"
    return f"blobs/{digest}"


def chunk_key(digest: str, index: int) -> str:
    """A chunk of a blob."""
    return f"{blob_prefix(digest)}/{index:05d}.safetensors"


def manifest_key(digest: str) -> str:
    """The manifest of a blob, which is whole if it has one."""
    return f"{blob_prefix(digest)}/manifest.json"


def record_key(adapter_id: str) -> str:
    """The record of a name."""
    assert is_adapter_id(adapter_id), "ids are checked before they reach the store"
    return f"adapters/{adapter_id}{RECORD_SUFFIX}"


def deleting_key(adapter_id: str) -> str:
    """The record of a name that an earlier version of Motet was deleting."""
    return record_key(adapter_id).removesuffix(RECORD_SUFFIX) + DELETING_SUFFIX


def versions_prefix(adapter_id: str) -> str:
    """Below it lie the documents of the versions of a name."""
    assert is_adapter_id(adapter_id), "ids are checked before they reach the store"
    return f"versions/{adapter_id}"


def version_key(adapter_id: str, digest: str) -> str:
    """The document of one version."""
    assert is_digest(digest), "digests are checked before they reach the store"
    return f"{versions_prefix(adapter_id)}/{digest}.json"
