"""Every field of PEFT's configuration, and every kind of adapter, is treated as a table says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from control_plane.errors import InvalidAdapter
from control_plane.registry.peft.config_fields import FIELDS, Use
from control_plane.registry.peft.kinds import FLAGS
from control_plane.registry.peft.peft_types import LORA, OTHER_TYPES
from tests.control_plane.registry.rig import CONFIG, pack, write_adapter


def test_every_field_of_peft_is_in_the_table() -> None:
    from peft import LoraConfig

    names = [field.name for field in FIELDS]
    assert {field.name for field in dataclasses.fields(LoraConfig)} <= set(names)
    assert len(set(names)) == len(names)
    assert set(FLAGS) <= {field.name for field in FIELDS if field.use is Use.READ}


def test_every_kind_of_peft_is_in_the_table() -> None:
    from peft import PeftType

    assert {kind.value for kind in PeftType} - {LORA} <= OTHER_TYPES.keys()


@pytest.mark.parametrize("field", FIELDS, ids=[field.name for field in FIELDS])
def test_a_field_is_treated_as_the_table_says(tmp_path: Path, field: Any) -> None:
    plain = pack(write_adapter(tmp_path / "plain"))
    files = write_adapter(tmp_path / "field", CONFIG | {field.name: {"any": ["value"]}})
    if field.use is Use.IGNORED:
        assert pack(files) == plain
        return
    with pytest.raises(InvalidAdapter) as refusal:
        pack(files)
    (violation,) = refusal.value.violations
    assert violation.field == field.name
    if field.use is Use.REFUSED:
        assert field.meaning in violation.description
        assert pack(write_adapter(tmp_path / "empty", CONFIG | {field.name: None})) == plain


@pytest.mark.parametrize("peft_type", sorted(OTHER_TYPES))
def test_another_kind_is_refused_by_name_and_nothing_else_is_said(tmp_path: Path, peft_type: str) -> None:
    config = {"peft_type": peft_type, "r": "many", "bias": 7}
    with pytest.raises(InvalidAdapter) as refusal:
        pack(write_adapter(tmp_path, json.dumps(config).encode()))
    (violation,) = refusal.value.violations
    name, advice = OTHER_TYPES[peft_type]
    assert violation.field == "peft_type"
    assert violation.description == f'is "{peft_type}"; {name} is not served; {advice}'
