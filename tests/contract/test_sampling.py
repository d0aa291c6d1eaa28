"""A sampling parameter is defined once, in types.proto: every part of the system takes it from there."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from motet.cli.main import main
from motet.requests import GenerateOptions, generate_request
from motet.v1 import generation_pb2, types_pb2
from motet.v1.sampling import DESCRIPTIONS, SamplingInEffect
from motet.wire import started_from

from contract.sampling import PARAMETERS, Parameter, from_message, to_message
from contract.v1.sampling import SamplingValues
from control_plane.api.generation.sampling_params import check_sampling, sampling_message
from control_plane.checks import Violations
from control_plane.fleet.workers.wire import PlanEncoder
from control_plane.scheduler.types import NewRow, RequestId, StepPlan
from data_plane.engine.sampling.sampler import Sampler
from data_plane.wire import decode_plan

VOCAB_SIZE = 1000
PROTOCOL = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"
by_parameter = pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)


def example(parameter: Parameter) -> float | int:
    """A value that is allowed and is not the default, exact as float32."""
    candidates = (0.25, 0.5, 1.5) if parameter.is_float else (2, 3, 7)
    return next(value for value in candidates if parameter.is_valid(value) and value != parameter.default)


def sampled(**given: Any) -> Any:
    violations = Violations()
    values = check_sampling(types_pb2.SamplingParams(**given), VOCAB_SIZE, lambda: 0, violations)
    violations.raise_if_any()
    return values


def settings_on_the_worker(**given: Any) -> dict[str, float]:
    """From a client's message through the scheduler's types and the plan stream to what the worker samples by."""
    row = NewRow(0, RequestId(1), (1, 2, 3), [], 0, [0], None, 0, sampled(**given))
    plan = PlanEncoder(1, VOCAB_SIZE).encode(StepPlan(1, [], [], [row])).step_plan
    (arrived,) = decode_plan(plan).new_rows
    sampler = Sampler(max_rows=1, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
    sampler.add(arrived)
    return sampler.inspect(0)


@by_parameter
def test_a_parameter_arrives_where_the_worker_samples(parameter: Parameter) -> None:
    name = parameter.attribute.removesuffix("_penalty")
    value = example(parameter)
    before, after = settings_on_the_worker(), settings_on_the_worker(**{parameter.name: value})
    assert before[name] == (-1 if parameter.default is None else np.float32(parameter.default))
    assert after == {**before, name: value}


@by_parameter
def test_out_of_bounds_is_refused_by_name(parameter: Parameter) -> None:
    wrong: list[float] = [] if parameter.highest is None else [parameter.highest + 1]
    wrong += [VOCAB_SIZE + 1] if parameter.is_at_most_vocabulary else []
    if parameter.is_float:
        assert parameter.lowest is not None and parameter.highest is not None, "a number has bounds"
        wrong += [parameter.lowest - 1, float("nan"), float("inf")]
        wrong += [parameter.lowest] if parameter.is_above_lowest else []
    for value in wrong:
        with pytest.raises(Exception, match=rf"^sampling\.{parameter.name}: is "):
            sampled(**{parameter.name: value if parameter.is_float else int(value)})


@by_parameter
def test_both_conversions_keep_a_parameter(parameter: Parameter) -> None:
    given: dict[str, Any] = {parameter.attribute: example(parameter)}
    values = SamplingValues(**given)
    assert [field.name for field, _ in to_message(values).ListFields()] == [parameter.name]
    assert SamplingValues(**from_message(to_message(values))) == values
    assert SamplingValues(**from_message(to_message(SamplingValues()))) == SamplingValues()


@by_parameter
def test_values_in_effect_may_be_sent_again(parameter: Parameter) -> None:
    values = sampled(**{parameter.name: example(parameter)})
    again = sampling_message(values, VOCAB_SIZE)
    assert getattr(again, parameter.name) == example(parameter)
    fields_again = {field.name: value for field, value in again.ListFields()}
    assert sampled(**fields_again) == values


@by_parameter
def test_the_sdk_sends_and_reports_a_parameter(parameter: Parameter) -> None:
    value = example(parameter)
    given = parameter.choices[int(value) - 1] if parameter.choices else value
    options: GenerateOptions = {parameter.name: given}  # type: ignore[misc]  # the name is a variable
    sent = generate_request("x", options).sampling
    assert [(field.name, value) for field, value in sent.ListFields()] == [(parameter.name, value)]
    if parameter.name in {field.name for field in fields(SamplingInEffect)}:
        started = started_from(generation_pb2.GenerationStarted(sampling=sent))
        assert getattr(started, parameter.name) == given


def test_every_parameter_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert [name for name in DESCRIPTIONS if f"--{name.replace('_', '-')} " not in text] == []
    assert [name for name, about in DESCRIPTIONS.items() if about not in text] == []


def test_the_documentation_has_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PROTOCOL.read_text("utf-8").split("## Sampling parameters")[1], re.M)
    expected = [(name, about) for name, about in DESCRIPTIONS.items()]
    assert rows[: len(expected)] == expected, "write the table of docs/protocol.md anew from motet.v1.sampling"
