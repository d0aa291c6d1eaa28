"""From SamplingParams and DecodingParams to checked, plain values with every default in effect, and back.

Every number is checked after parsing: protobuf truncates integers silently and lets NaN pass. `sampling_message` and
`decoding_message` tell a client what is in effect, as values that it may send again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from motet.v1 import generation_pb2, types_pb2

from contract.sampling import MAX_BIAS, MIN_BIAS, PARAMETERS, Parameter
from control_plane.checks import Violations
from control_plane.scheduler.types import BeamSearch, Sampling

MAX_BIASES = 1024
MAX_COMPLETIONS = 1024  # far above the rows of any worker; a request above a worker's own limit is refused there
MIN_BEAMS, MAX_BEAMS = 2, 16
MAX_LENGTH_PENALTY = 10.0  # either sign


@dataclass(frozen=True, slots=True)
class Decoding:
    """How many completions a request gets, and how they are chosen."""

    n: int = 1  # completions to return
    best_of: int = 1  # completions to sample; n with beam search
    beam: BeamSearch | None = None

    @property
    def num_indices(self) -> int:
        """Completions that are computed."""
        return self.best_of if self.beam is None else self.beam.width

    @property
    def is_ranked(self) -> bool:
        """Whether completions are chosen, and therefore sent, when all have ended."""
        return self.beam is not None or self.best_of > self.n


def check_sampling(
    params: types_pb2.SamplingParams, vocab_size: int, draw_seed: Callable[[], int], violations: Violations
) -> Sampling:
    """The sampling values in effect, without those that other messages hold."""
    values = {
        parameter.attribute: _checked_number(params, parameter, vocab_size, violations) for parameter in PARAMETERS
    }
    if not params.HasField("seed"):
        values["seed"] = draw_seed()
    if values["top_k"] == vocab_size:
        values["top_k"] = 0
    if values["num_prompt_logprobs"] is not None and values["logprobs_mode"] == types_pb2.LOGPROBS_MODE_PROCESSED:
        violations.add(
            "sampling.prompt_logprobs",
            "is set with logprobs_mode of processed; a prompt is not sampled, so request its raw log-probabilities "
            "in a call of their own",
        )
    return Sampling(**values, logit_bias=_checked_logit_bias(params.logit_bias, vocab_size, violations))


def set_defaults(request: generation_pb2.GenerateRequest, defaults: Mapping[str, float]) -> None:
    """Set the sampling parameters that the client left unset. A beam search, which does not sample, gets none."""
    if request.decoding.HasField("beam_search"):
        return
    for name, value in defaults.items():
        if not request.sampling.HasField(name):
            setattr(request.sampling, name, value)


def check_decoding(params: types_pb2.DecodingParams, sampling: Sampling, violations: Violations) -> Decoding:
    """How many completions, and how. `sampling` is checked already; beam search restricts it."""
    n = params.n if params.HasField("n") else 1
    best_of = params.best_of if params.HasField("best_of") else n
    for name, value in (("n", n), ("best_of", best_of)):
        if params.HasField(name) and not 1 <= value <= MAX_COMPLETIONS:
            violations.add(f"decoding.{name}", f"is {value}; give a count from 1 to {MAX_COMPLETIONS}")
    if not params.HasField("beam_search"):
        if 1 <= best_of < n:
            violations.add(
                "decoding.best_of", f"is {best_of}, below decoding.n, {n}; give at least as many, or leave it unset"
            )
        return Decoding(n, best_of)
    beam = _checked_beam_search(params.beam_search, violations)
    if best_of != n:
        violations.add(
            "decoding.best_of", f"{best_of} with beam_search; leave it unset, decoding.n picks the best of the beams"
        )
    if n > max(beam.width, MIN_BEAMS):
        violations.add("decoding.n", f"is {n}, above decoding.beam_search.width, {beam.width}; give at most as many")
    _refuse_sampling_with_beams(sampling, violations)
    return Decoding(n, n, beam)


def sampling_message(sampling: Sampling, vocab_size: int) -> types_pb2.SamplingParams:
    """Sampling values in effect, with every field set, but not log-probabilities that were not requested."""
    values = {parameter.name: getattr(sampling, parameter.attribute) for parameter in PARAMETERS}
    # Keeping all is keeping as many as there are: a value that a client may send back.
    values["top_k"] = sampling.top_k or vocab_size
    return types_pb2.SamplingParams(**values, logit_bias=dict(sampling.logit_bias))


def decoding_message(decoding: Decoding) -> types_pb2.DecodingParams:
    """Decoding values in effect, every field set; beam_search only for a beam search."""
    message = types_pb2.DecodingParams(n=decoding.n, best_of=decoding.best_of)
    beam = decoding.beam
    if beam is not None:
        message.beam_search.width = beam.width
        message.beam_search.length_penalty = beam.length_penalty
        message.beam_search.early_stopping = beam.early_stopping
    return message


def _checked_number(
    params: types_pb2.SamplingParams, parameter: Parameter, vocab_size: int, violations: Violations
) -> Any:
    """The parameter's value, the default where it is unset; a violation where it is out of bounds."""
    if not params.HasField(parameter.name):
        return parameter.default
    value = getattr(params, parameter.name)
    is_too_many = parameter.is_at_most_vocabulary and value > vocab_size
    if is_too_many or not parameter.is_valid(value):
        violations.add(f"sampling.{parameter.name}", f"is {value}; {_bounds(parameter, vocab_size)}")
    return value


def _bounds(parameter: Parameter, vocab_size: int) -> str:
    """What to give instead of a value that is out of bounds."""
    if parameter.choices:
        return "give " + " or ".join(f"{number} ({name})" for number, name in enumerate(parameter.choices, start=1))
    if parameter.is_float:
        lowest = f"{parameter.lowest:g}"
        lowest = f"above {lowest} and at most" if parameter.is_above_lowest else f"from {lowest} to"
        note = f"; {parameter.note}" if parameter.note else ""
        return f"give a value {lowest} {parameter.highest:g}{note}"
    if parameter.highest is None:
        highest = f"the vocabulary size {vocab_size}"
    else:
        highest = str(min(int(parameter.highest), vocab_size))
    return f"give a count from {parameter.lowest or 0:g} to {highest}, or leave it unset for {parameter.unset}"


def _checked_logit_bias(
    biases: Mapping[int, float], vocab_size: int, violations: Violations
) -> tuple[tuple[int, float], ...]:
    if len(biases) > MAX_BIASES:
        violations.add("sampling.logit_bias", f"{len(biases)} entries; at most {MAX_BIASES}")
        return ()
    for token_id, bias in sorted(biases.items()):
        if token_id >= vocab_size:
            violations.add(
                f"sampling.logit_bias[{token_id}]", f"{token_id} is not below the vocabulary size {vocab_size}"
            )
        if not MIN_BIAS <= bias <= MAX_BIAS:
            violations.add(
                f"sampling.logit_bias[{token_id}]", f"is {bias}; give a value from {MIN_BIAS:g} to {MAX_BIAS:g}"
            )
    return tuple(sorted(biases.items()))


def _checked_beam_search(params: types_pb2.BeamSearchParams, violations: Violations) -> BeamSearch:
    if not MIN_BEAMS <= params.width <= MAX_BEAMS:
        violations.add("decoding.beam_search.width", f"is {params.width}; give a count from {MIN_BEAMS} to {MAX_BEAMS}")
    length_penalty = params.length_penalty if params.HasField("length_penalty") else 1.0
    if not -MAX_LENGTH_PENALTY <= length_penalty <= MAX_LENGTH_PENALTY:  # NaN is not either
        violations.add(
            "decoding.beam_search.length_penalty",
            f"is {length_penalty}; give a value from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}",
        )
    return BeamSearch(params.width, length_penalty, params.early_stopping)


def _refuse_sampling_with_beams(sampling: Sampling, violations: Violations) -> None:
    """A beam search takes the most likely continuations: whatever changes the choice of a token has no meaning."""
    given = [item.name for item in PARAMETERS if getattr(sampling, item.attribute) != item.default]
    given += ["logit_bias"] if sampling.logit_bias else []
    for name in given:
        if name != "seed":  # it has no effect, as in greedy decoding
            violations.add(f"sampling.{name}", "set with decoding.beam_search, which does not sample; leave it unset")
