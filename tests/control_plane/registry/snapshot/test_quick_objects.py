"""Objects of frozen dataclasses that are made without their `__init__`: the same as those that are made with it."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from control_plane.registry.records import AdapterRecord, AdapterVersion
from control_plane.registry.snapshot.quick_objects import quick
from control_plane.registry.store.record_documents import StoredRecord


@pytest.mark.parametrize("kind", [AdapterRecord, AdapterVersion, StoredRecord])
def test_an_object_is_that_of_the_class(kind: Any) -> None:
    values = [("value", number) for number, _ in enumerate(dataclasses.fields(kind))]
    made, usual = quick(kind)(*values), kind(*values)
    assert type(made) is kind
    assert (made, hash(made), repr(made)) == (usual, hash(usual), repr(usual))
    assert pickle.loads(pickle.dumps(made)) == usual
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(kind)[0].name, 0)


def test_what_is_left_out_is_the_default() -> None:
    required = [f.name for f in dataclasses.fields(AdapterVersion) if f.default is dataclasses.MISSING]
    assert quick(AdapterVersion)(*required) == AdapterVersion(*required)  # type: ignore[arg-type]  # names as values


def test_a_value_too_few_or_too_many_is_refused() -> None:
    with pytest.raises(TypeError):
        quick(StoredRecord)("record", ())
    with pytest.raises(TypeError):
        quick(StoredRecord)("record", (), False, "more")


def test_a_class_that_does_more_than_take_values_is_refused() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Checked:
        value: int

        def __post_init__(self) -> None:
            raise AssertionError

    with pytest.raises(AssertionError, match="nothing but the fields"):
        quick(Checked)
