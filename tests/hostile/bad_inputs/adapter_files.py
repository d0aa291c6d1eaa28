"""What is inside an adapter: configs and weights that are not an adapter of the base model, sent as whole uploads.

The tables of the ingest tests are sent through the wire as well; below are the cases that only a server decides.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

from tests.control_plane.registry.peft.test_bad_adapters import BAD_FIELDS, BAD_FILES
from tests.control_plane.registry.rig import with_header
from tests.hostile.bad_inputs.case import ANY_FIELD, OK, Case, short
from tests.hostile.bad_inputs.facts import CONFIG_FILE, WEIGHTS_FILE, Facts
from tests.hostile.bad_inputs.uploads import case, upload

REASON = "ADAPTER_INVALID"


def cases(facts: Facts) -> Iterator[Case]:
    """All of them. None leaves an adapter behind."""
    files = facts.files
    for field, value in BAD_FIELDS:
        # What modules there are differs from one base model to another.
        fields = ANY_FIELD if field == "target_modules" else (field,)
        yield case(
            f"{field} = {short(value)}", _sent(config_with(files, **{field: value})), fields=fields, reason=REASON
        )
    for name, data, _ in BAD_FILES:
        yield _weights(files, f"weights: {name}", data)
    yield from _configs(files)
    yield from _tensors(files)


def config_with(files: dict[str, bytes], **changes: object) -> dict[str, bytes]:
    config = {**json.loads(files[CONFIG_FILE]), **changes}
    return {**files, CONFIG_FILE: json.dumps(config).encode()}


def _sent(files: dict[str, bytes]) -> list[Any]:
    """To be registered: what is refused must leave nothing."""
    return upload(files, "bad")


def _checked(files: dict[str, bytes]) -> list[Any]:
    """Not to be registered, for it would be."""
    return upload(files, "valid", validate_only=True)


def _weights(files: dict[str, bytes], name: str, data: bytes, *fields: str) -> Case:
    """Refused, in the name of the file or of one of its tensors."""
    return case(name, _sent({**files, WEIGHTS_FILE: data}), fields=fields or ANY_FIELD, reason=REASON)


def _configs(files: dict[str, bytes]) -> Iterator[Case]:
    due = {"fields": (CONFIG_FILE,), "reason": REASON}
    for name, raw in {
        "not JSON": b"not json",
        "a JSON list": b"[]",
        "a JSON number": b"7",
        "cut off": files[CONFIG_FILE][:-3],
        "a BOM": b"\xef\xbb\xbf" + files[CONFIG_FILE],
        "UTF-16": files[CONFIG_FILE].decode().encode("utf-16"),
        "invalid UTF-8": b'{"r": "\xff"}',
        "100 000 brackets": b"[" * 100_000,
        "100 000 braces": b'{"a":' * 100_000,
        "a number of 5 000 digits": b'{"r": ' + b"9" * 5000 + b"}",
        "NaN": b'{"r": NaN}',
        "Infinity": b'{"lora_alpha": Infinity}',
        "a key twice": b'{"r": 1, "r": 4}',
        "more than a MiB": b'{"a":"' + b"x" * (1 << 20) + b'"}',
    }.items():
        yield case(f"config: {name}", _sent({**files, CONFIG_FILE: raw}), **due)
    for field, value in (
        ("surprise", 1),
        ("r", 0.5),
        ("r", []),
        ("lora_alpha", -1e10),
        ("lora_alpha", {}),
        ("target_modules", [["q_proj"]]),
        ("target_modules", [1]),
        ("target_modules", {"q_proj": 1}),
        ("rank_pattern", {"": "4"}),
        ("alpha_pattern", {"q_proj": None}),
        ("alpha_pattern", {"(.*)*X": 1}),
        ("exclude_modules", [[".."]]),
        ("init_lora_weights", {}),
        ("peft_type", ["LORA"]),
        ("peft_type", "lora\0"),
    ):
        yield case(f"{field} = {short(value)}", _sent(config_with(files, **{field: value})), fields=(field,))
    for field, value in (("r", 16), ("r", 2**64), ("rank_pattern", {"q_proj": 2**70})):  # other ranks than the tensors'
        sent = _sent(config_with(files, **{field: value}))
        yield case(f"{field} = {short(value)}", sent, fields=("model.layers.0.self_attn.q_proj.lora_A",), says="shape")
    nested: Any = 1
    for _ in range(500):
        nested = {"a": nested}
    yield case("a value 500 levels deep", _sent(config_with(files, surprise=nested)), fields=("surprise",))
    yield case("as it is", _checked(files), code=OK)
    for field, value in (
        ("target_modules", "(.*)*X"),  # never run
        ("exclude_modules", "(.*)*X"),
        ("exclude_modules", ["..", ""]),
        ("rank_pattern", {"(.*)*X": 4, "": 4}),
        ("layers_to_transform", [2**70, *range(64)]),
    ):
        yield case(f"{field} = {short(value)}", _checked(config_with(files, **{field: value})), code=OK)
    yield case("unknown keys without a value", _checked(config_with(files, future=None, other={}, more=[])), code=OK)


def _tensors(files: dict[str, bytes]) -> Iterator[Case]:
    good = files[WEIGHTS_FILE]
    size = int.from_bytes(good[:8], "little")
    header, payload = json.loads(good[8 : 8 + size]), good[8 + size :]

    def changed(**entries: Any) -> bytes:
        return with_header(json.dumps({**header, **entries}).encode(), payload)

    for name, data in {
        "7 bytes": good[:7],
        "8 bytes": good[:8],
        "cut in the header": good[:40],
        "one byte more": good + b"\0",
        "a header of 2^60 bytes": (2**60).to_bytes(8, "little") + b"{}",
        "a header of 2^64 - 1 bytes": b"\xff" * 8 + b"{}",
        "a header of 0 bytes": bytes(8),
        "a header one byte too long": (size + len(payload) + 1).to_bytes(8, "little") + good[8:],
        "a pickle of protocol 2": pickle.dumps({"a": 1}, protocol=2),
        "a pickle of protocol 5": pickle.dumps({"a": 1}, protocol=5) + b"x" * 100,
        "a zip": b"PK\x03\x04" + b"\0" * 100,
        "xz": b"\xfd7zXZ\0\0\x01" + b"x" * 100,
        "bzip2": b"BZh9\0\0\0\x01" + b"x" * 100,
        "a git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1\n",
        "HTML": b"<!DOCTYPE html><html><body>404</body></html>",
        "50 000 tensors": with_header(json.dumps({f"t{i}": _entry([0], 0, 0) for i in range(50_000)}).encode()),
    }.items():
        yield _weights(files, f"weights: {name}", data, WEIGHTS_FILE)
    yield _weights(files, "weights: cut in the data", good[:-8], _last(header))
    for name, metadata in {
        "a number": 5,
        "a list": [],
        "text": "pt",
        "a number within": {"format": 1},
        "a map within": {"format": {}},
        "null within": {"format": None},
    }.items():
        yield _weights(files, f"weights: __metadata__ of {name}", changed(__metadata__=metadata), WEIGHTS_FILE)
    for name, metadata in {
        "other keys": {"framework": "x", "\0": "\0", "é": "\U0001f642"},
        "nothing": {},
        "many": {f"k{i}": "v" for i in range(1000)},
    }.items():
        whole = {**files, WEIGHTS_FILE: changed(__metadata__=metadata)}
        yield case(f"weights: __metadata__ of {name}", _checked(whole), code=OK)
    for name, bits in {"NaN": b"\0\0\xc0\x7f", "infinity": b"\0\0\x80\x7f", "-infinity": b"\0\0\x80\xff"}.items():
        yield _weights(files, f"weights: {name}", good[:-4] + bits, _last(header))


def _entry(shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


def _last(header: dict[str, Any]) -> str:
    """The tensor whose data ends the file."""
    names = [name for name in header if name != "__metadata__"]
    return max(names, key=lambda name: int(header[name]["data_offsets"][1]))
