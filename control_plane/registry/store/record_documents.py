"""The documents in which the store keeps adapters: how records and versions are written and read.

A record's document names its versions by digest; each version has a document of its own, written once. So a change of
a name writes little, however many versions it has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache, lru_cache
from operator import itemgetter
from typing import Any

from control_plane.access.tenant_names import is_tenant
from control_plane.access.visibility import NOBODYS, Ownership, Visibility
from control_plane.registry.records import NONE_ACTIVE, AdapterRecord, AdapterState, AdapterVersion
from control_plane.registry.snapshot.quick_objects import quick
from control_plane.registry.versions.rollout import NO_ROLLOUT, decode_rollout, encode_rollout
from control_plane.registry.versions.verification import verification_of
from control_plane.signatures.verdict import SignatureMethod, SignatureVerdict

_VERSION_FORMAT = 2
# 1: with the versions in it; 2: versions in documents of their own; 3: with the ownership; 4: with a rollout, which
# records without one do not need
_RECORD_FORMAT = 3
_ROLLOUT_FORMAT = 4


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record as its document has it."""

    record: AdapterRecord  # without versions, unless `is_old`
    digests: tuple[str, ...]  # of its versions, newest first
    is_old: bool  # in the old format, which holds the versions: to be written again


# Fields of a record that its document does not have: found out, in documents of their own, or as several members.
_NOT_STORED = frozenset({"state", "state_reason", "versions", "ownership", "rollout"})
# What a record or version has where its document says nothing.
_RECORD_DEFAULTS = {f.name: f.default for f in fields(AdapterRecord) if f.default is not MISSING} | {
    "state": AdapterState.ACTIVE,
    "state_reason": "",
    "versions": (),
}
_VERSION_DEFAULTS = {f.name: f.default for f in fields(AdapterVersion) if f.default is not MISSING}
_record_values = itemgetter(*(f.name for f in fields(AdapterRecord)))
_version_values = itemgetter(*(f.name for f in fields(AdapterVersion)))
# As the classes themselves, with all values in the order of their fields.
make_record, make_version, make_stored = quick(AdapterRecord), quick(AdapterVersion), quick(StoredRecord)
_LISTS_OF_TEXTS = frozenset({"parts", "files", "labels", "warnings"})
_FEW_VALUES = ("kind", "dtype", "base_fingerprint")  # thousands of versions have the same one: it is one object
_SIGNED, _METHOD = frozenset({"signature", "verification"}), frozenset({"method"})
_MODULES_KEY = b'"target_modules": ['
# Lists of modules by themselves, so that versions of the same modules share one; see _module_names.
_KNOWN_MODULES: dict[tuple[str, ...], tuple[str, ...]] = {}
_MAX_KNOWN_MODULES = 10_000
# One list of names as a document has it, and the names: most versions have those of the version that was read before.
_LAST_MODULES: list[tuple[bytes, tuple[str, ...]]] = [(b"[]", ())]
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # typeshed leaves it out
_GOOD_SHAPES: dict[tuple[Any, ...], tuple[str, ...]] = {}  # see _checked
_MAX_GOOD_SHAPES = 1000
_JSON_TYPES: dict[str, frozenset[type]] = {
    "str": frozenset({str}),
    "int": frozenset({int}),
    "float": frozenset({int, float}),
    "bool": frozenset({bool}),
    "dict[str, str]": frozenset({dict}),
    "tuple[str, ...]": frozenset({list, tuple}),
    "tuple[int, ...]": frozenset({list, tuple}),
}


def encode_record(record: AdapterRecord) -> bytes:
    """The stored document of a record."""
    document = {f.name: getattr(record, f.name) for f in fields(record) if f.name not in _NOT_STORED}
    document["version_digests"] = [version.digest for version in record.versions]
    document["owner"] = record.ownership.owner
    document["visibility"] = record.ownership.visibility.value
    document["shared_with"] = record.ownership.shared_with
    rollout = encode_rollout(record.rollout)
    if rollout:
        document["rollout"] = rollout
    document["format"] = _ROLLOUT_FORMAT if rollout else _RECORD_FORMAT
    return json.dumps(document, sort_keys=True).encode()


def encode_version(version: AdapterVersion) -> bytes:
    """The stored document of a version."""
    document = asdict(version) | {"format": _VERSION_FORMAT}
    for name in ("context_length", "vocab_size", "num_rows", "source"):
        if not document[name]:  # as documents were before there were such adapters
            del document[name]
    if not version.files:
        del document["files"]
    if version.signature is None:  # as documents were before there were signatures
        del document["signature"]
    else:
        document["signature"]["method"] = version.signature.method.value
    if version.verification is None:
        del document["verification"]
    for name in (
        "labels",
        "problem_type",
        "alora_invocation_tokens",
        "warnings",
    ):  # likewise
        if not document[name]:
            del document[name]
    return json.dumps(document, sort_keys=True).encode()


def decode_record(raw: bytes) -> StoredRecord:
    """Read a record's document. Raises ValueError with what is wrong."""
    document = _object(raw)
    match document.pop("format", None):
        case 1:
            return _decode_with_versions(document)
        case 2 | 3 | 4 as number:
            ownership = _ownership(document) if number >= _RECORD_FORMAT else NOBODYS
            rollout = decode_rollout(document.pop("rollout", None)) if number == _ROLLOUT_FORMAT else NO_ROLLOUT
            digests = document.pop("version_digests", None)
            if not isinstance(digests, list) or not all(map(_is_text, digests)):
                raise ValueError("version_digests is missing or is not a list")
            values = _RECORD_DEFAULTS | _checked(AdapterRecord, document, skip=_NOT_STORED)
            values["ownership"], values["rollout"] = ownership, rollout
            return make_stored(make_record(*_record_values(values)), tuple(digests), False)
        case other:
            raise ValueError(f"it has format {other!r}; it was written by another version of Motet")


def decode_version(raw: bytes) -> AdapterVersion:
    """Read a version's document. Raises ValueError with what is wrong.

    The list of modules is most of it, and that of thousands of versions: it is parsed once.
    """
    start, modules = raw.find(_MODULES_KEY), None
    begin = start + len(_MODULES_KEY) - 1
    last, names = _LAST_MODULES[0]
    if start >= 0 and raw.startswith(last, begin):  # a look in the cache takes the hash of the list
        end, modules = begin + len(last), names
    elif 0 <= start < (end := raw.find(b"]", start) + 1):
        modules = _modules_of(raw[begin:end])
        if modules is not None:
            _LAST_MODULES[0] = (raw[begin:end], modules)
    if modules is None:
        document = _object(raw)
    else:
        document = _object(raw[:start] + _MODULES_KEY[:-1] + b"0" + raw[end:])
        if document.get("target_modules") != 0:
            document = _object(raw)  # the key is that of something else
        else:
            document["target_modules"] = modules
    if (found := document.pop("format", None)) != _VERSION_FORMAT:
        raise ValueError(f"it has format {found!r}; it was written by another version of Motet")
    return _version(document)


def with_versions(stored: StoredRecord, found: Mapping[str, AdapterVersion]) -> AdapterRecord:
    """The record with those of its versions that have a document, by digest. Without its active one it is FAILED.

    `stored` was just decoded, and its record becomes the one that is returned.
    """
    versions = tuple([found[digest] for digest in stored.digests if digest in found])
    record = stored.record
    # Nobody else has the record yet: a copy for each of 100,000 names takes a tenth of a start.
    object.__setattr__(record, "versions", versions)
    if record.active_version is not None:
        return record
    reason = "the document of its active version is missing or cannot be read; register it again"
    return replace(record, state=AdapterState.FAILED, state_reason=reason if record.active_digest else NONE_ACTIVE)


def _decode_with_versions(document: dict[str, Any]) -> StoredRecord:
    listed = document.pop("versions", None)
    if not isinstance(listed, list) or not all(isinstance(version, dict) for version in listed):
        raise ValueError("versions is missing or is not a list")
    # They had no numbers: counted from the oldest, which is the last.
    versions = tuple(_version(version | {"number": len(listed) - place}) for place, version in enumerate(listed))
    state = AdapterState(document.pop("state", None))
    document.pop("state_reason", None)
    values = _checked(AdapterRecord, document | {"last_number": len(versions)}, skip=_NOT_STORED)
    record = AdapterRecord(**values, state=state, state_reason="", versions=versions)
    if record.active_version is None:
        raise ValueError("the active version is not among its versions")
    return StoredRecord(record, tuple(version.digest for version in versions), is_old=True)


def _ownership(document: dict[str, Any]) -> Ownership:
    """Take the ownership out of a record's document. Raises ValueError: nothing is guessed about who sees a record."""
    owner, tenants = document.pop("owner", None), document.pop("shared_with", None)
    if not isinstance(owner, str) or not (owner == "" or is_tenant(owner)):
        raise ValueError("owner is missing or is not a tenant")
    if not isinstance(tenants, list) or not all(map(_is_tenant, tenants)):
        raise ValueError("shared_with is missing or is not a list of tenants")
    visibility = document.pop("visibility", None)
    if not isinstance(visibility, str):
        raise ValueError(f"{visibility!r} is not a valid Visibility")
    return _ownership_of(owner, visibility, tuple(tenants))


@lru_cache(maxsize=1024)
def _ownership_of(owner: str, visibility: str, tenants: tuple[str, ...]) -> Ownership:
    """The ownership that a document's members say, as one object for many names. Raises ValueError."""
    known = Visibility(visibility)
    if (known is Visibility.SHARED) != bool(tenants):
        raise ValueError(f"visibility {visibility} contradicts shared_with")
    return Ownership(owner, known, tenants)


def _version(document: dict[str, Any]) -> AdapterVersion:
    signed, verified = document.pop("signature", None), document.pop("verification", None)
    values = _VERSION_DEFAULTS | _checked(AdapterVersion, document, skip=_SIGNED)
    if isinstance(modules := values["target_modules"], list):
        values["target_modules"] = _module_names(modules)
    for name in _LISTS_OF_TEXTS & document.keys():
        values[name] = _items(values[name], name, "texts", _is_text)
    if "alora_invocation_tokens" in document:
        tokens = values["alora_invocation_tokens"]
        values["alora_invocation_tokens"] = _items(tokens, "alora_invocation_tokens", "token ids", _is_token)
    for name in _FEW_VALUES:
        values[name] = sys.intern(values[name])
    if signed is not None:
        values["signature"] = _signature(signed)
    if verified is not None:
        values["verification"] = verification_of(verified)
    return make_version(*_version_values(values))


def _items(found: Sequence[Any], name: str, what: str, is_item: Callable[[Any], bool]) -> tuple[Any, ...]:
    """The items of a list of a document. Raises ValueError. Most lists are empty, and cost next to nothing."""
    if found and not all(map(is_item, found)):
        raise ValueError(f"{name} is not a list of {what}")
    return tuple(found)


def _is_tenant(value: Any) -> bool:
    return isinstance(value, str) and is_tenant(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_token(value: Any) -> bool:
    return type(value) is int and value >= 0


def _module_names(modules: list[Any]) -> tuple[str, ...]:
    """The names, as the same object for all versions that name the same modules: thousands do."""
    if not all(isinstance(module, str) for module in modules):
        raise ValueError("target_modules is not a list of names")
    if len(_KNOWN_MODULES) > _MAX_KNOWN_MODULES:
        _KNOWN_MODULES.clear()
    names = tuple(modules)
    return _KNOWN_MODULES.setdefault(names, names)


@lru_cache(maxsize=256)
def _modules_of(raw: bytes) -> tuple[str, ...] | None:
    """The names in a JSON list; None if it is not a list of names."""
    try:
        return _module_names(json.loads(raw))
    except ValueError:
        return None


def _signature(document: Any) -> SignatureVerdict:
    if not isinstance(document, dict):
        raise ValueError("signature is not a JSON object")
    method = SignatureMethod(document.pop("method", None))
    return SignatureVerdict(method=method, **_checked(SignatureVerdict, document, skip=_METHOD))


def _object(raw: bytes) -> dict[str, Any]:
    try:
        document = _parse(raw.decode())  # from text: of bytes the encoding is guessed first
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not text in UTF-8 from byte {error.start} on") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    return document


def _parse(text: str) -> Any:
    """Parse JSON without looking for spaces around it, in half the time of json.loads for a small document."""
    try:
        document, end = _scan(text, 0)
    except (ValueError, StopIteration):
        return json.loads(text)
    return document if end == len(text) else json.loads(text)


@cache
def _stored_fields(kind: Any, skip: frozenset[str]) -> tuple[dict[str, frozenset[type]], frozenset[str]]:
    """The types of the fields that a document of the dataclass may have, and those that it must have."""
    known = {f.name: f for f in fields(kind) if f.name not in skip}
    required = frozenset(name for name, f in known.items() if f.default is MISSING)
    return {name: _JSON_TYPES[str(f.type)] for name, f in known.items()}, required


def _checked(kind: type[Any], document: dict[str, Any], *, skip: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The document's fields, if they are those of the dataclass, each of its type. Raises ValueError."""
    # Documents of one format have the same names and types: these are compared once. Texts in dictionaries always are.
    shape = (kind, skip, tuple(document), tuple(map(type, document.values())))
    dicts = _GOOD_SHAPES.get(shape)
    if dicts is None:
        dicts = _check_shape(kind, skip, document)
        if len(_GOOD_SHAPES) < _MAX_GOOD_SHAPES:
            _GOOD_SHAPES[shape] = dicts
    for name in dicts:
        if not all(map(_is_text, document[name].values())):
            raise ValueError(f"{name} is of the wrong type")
    return document


def _check_shape(kind: type[Any], skip: frozenset[str], document: dict[str, Any]) -> tuple[str, ...]:
    """The names of dictionaries in a document with the fields of the dataclass, each of its type. Raises ValueError."""
    known, required = _stored_fields(kind, skip)  # type: ignore[arg-type]  # mypy: a class of Any is not hashable
    if not required <= document.keys() <= known.keys():
        wrong = sorted((document.keys() - known.keys()) | (required - document.keys()))
        raise ValueError(f"fields are missing or not known: {', '.join(wrong)[:200]}")
    for name, value in document.items():
        if type(value) not in known[name]:
            raise ValueError(f"{name} is of the wrong type")
    return tuple(name for name, value in document.items() if type(value) is dict)
