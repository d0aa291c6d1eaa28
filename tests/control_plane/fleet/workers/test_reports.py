"""What a Hello says about the modules is bounded, and read as the worker meant it."""

from __future__ import annotations

import numpy as np
import pytest

from contract.hello_bounds import MAX_REASON_BYTES
from contract.v1 import plan_pb2
from control_plane.errors import InvalidRequest
from control_plane.fleet.gate.hello import check_hello
from control_plane.fleet.workers.reports import (
    MAX_PATH_BYTES,
    MAX_TARGET_ENTRIES,
    MAX_TARGET_MODULES,
    report_of,
)
from control_plane.registry.model.served_modules import ModuleKind, ServedModule
from data_plane.plan import TargetKind, TargetModule
from data_plane.wire import encode_hello, encode_targets
from tests.fakes.fleet_rig import CAPACITIES, FakeBaseModel

Entry = plan_pb2.TargetModules


def hello(*entries: Entry) -> plan_pb2.Hello:
    message = encode_hello(CAPACITIES, "w0").hello
    message.target_modules.extend(entries)
    return message


def entry(path: str = "lm_head", layers: bytes = b"", **fields: object) -> Entry:
    defaults: dict[str, object] = {"kind": Entry.KIND_LINEAR, "in_features": 4, "out_features": 8}
    return Entry(path=path, layers=layers, **(defaults | fields))  # type: ignore[arg-type]  # the caller's fields


def ints(*values: int) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


MODULES = (
    TargetModule("model.embed_tokens", TargetKind.EMBEDDING, 256, 64),
    *(TargetModule(f"model.layers.{i}.up", TargetKind.LINEAR, 64, 128) for i in (3, 0, 7)),
    TargetModule("model.layers.1.up", TargetKind.LINEAR, 64, 96),
    *(
        TargetModule(f"model.layers.{i}.experts.{e}.up", TargetKind.LINEAR, 64, 32, "no")
        for i in range(3)
        for e in (0, 5)
    ),
    TargetModule("lm_head", TargetKind.HEAD, 64, 256),
)


def test_the_modules_of_a_worker_arrive_as_it_has_them() -> None:
    message = hello(*encode_targets(MODULES))
    check_hello(message, FakeBaseModel())
    report = report_of(message)
    assert report.max_model_len == CAPACITIES.max_model_len
    assert report.modules == {
        module.name: ServedModule(ModuleKind(module.kind.value), module.in_features, module.out_features, module.reason)
        for module in MODULES
    }


def test_modules_that_differ_in_their_layer_alone_travel_as_one() -> None:
    assert [(message.path, np.frombuffer(message.layers, "<i4").tolist()) for message in encode_targets(MODULES)] == [
        ("model.embed_tokens", []),
        ("model.layers.*.up", [0, 3, 7]),
        ("model.layers.*.up", [1]),
        ("model.layers.*.experts.0.up", [0, 1, 2]),
        ("model.layers.*.experts.5.up", [0, 1, 2]),
        ("lm_head", []),
    ]
    many = [TargetModule(f"model.layers.{i}.mlp.up_proj", TargetKind.LINEAR, 4096, 14336) for i in range(1000)]
    assert sum(message.ByteSize() for message in encode_targets(many)) < 4200


def test_two_workers_of_one_model_share_what_they_reported() -> None:
    messages = [hello(*encode_targets(MODULES)) for _ in range(2)]
    assert report_of(messages[0]).modules is report_of(messages[1]).modules


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (entry(""), "path"),
        (entry("a" * (MAX_PATH_BYTES + 1)), "path"),
        (entry("a..b"), "path"),
        (entry("a b"), "path"),
        (entry("*"), "path"),
        (entry("a\n"), "path"),
        (entry("é"), "path"),
        (entry("a.*.b"), "layers"),
        (entry("a.*.b.*", ints(1)), "layers"),
        (entry("a", ints(1)), "layers"),
        (entry("a.*", ints(1) + b"x"), "layers"),
        (entry("a.*", ints(1, 1)), "layers"),
        (entry("a.*", ints(2, 1)), "layers"),
        (entry("a.*", ints(-1)), "layers"),
        (entry("a.*", ints(1 << 30)), "layers"),
        (entry(kind=0), "kind"),
        (entry(kind=9), "kind"),
        (entry(in_features=0), "in_features"),
        (entry(out_features=2**31), "out_features"),
        (entry(reason="x" * (MAX_REASON_BYTES + 1)), "reason"),
        (entry(reason="a\nb"), "reason"),
        (entry(reason="é"), "reason"),
    ],
)
def test_an_entry_that_cannot_be_is_refused_by_its_field(bad: Entry, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_hello(hello(entry(), bad, bad), FakeBaseModel())
    assert [violation.field for violation in refusal.value.violations] == [f"hello.target_modules[1].{field}"]
    assert len(str(refusal.value)) < 400


def test_the_number_of_entries_and_of_modules_is_bounded() -> None:
    check_hello(hello(*(entry(f"a{i}") for i in range(MAX_TARGET_ENTRIES))), FakeBaseModel())
    with pytest.raises(InvalidRequest, match=f"at most {MAX_TARGET_ENTRIES}"):
        check_hello(hello(*(entry(f"a{i}") for i in range(MAX_TARGET_ENTRIES + 1))), FakeBaseModel())
    layers = ints(*range(MAX_TARGET_MODULES // 2))
    check_hello(hello(entry("a.*", layers), entry("b.*", layers)), FakeBaseModel())
    with pytest.raises(InvalidRequest, match=f"at most {MAX_TARGET_MODULES}"):
        check_hello(hello(entry("a.*", layers), entry("b.*", layers), entry()), FakeBaseModel())
