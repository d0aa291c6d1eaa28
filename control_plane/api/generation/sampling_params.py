"""From SamplingParams and DecodingParams to checked, plain values with every default in effect, and back.

Every number is checked after parsing: protobuf truncates integers silently and lets NaN pass. `sampling_message` and
`decoding_message` tell a client what is in effect, as values that it may send again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from motet.v1 import types_pb2

from control_plane.checks import Violations
from control_plane.scheduler.types import BeamSearch, Sampling

MAX_TEMPERATURE = 100.0
# 0.01 as float32. Divided by far less, a logit exceeds float32, and the token with the lowest id gets all probability.
MIN_REPETITION_PENALTY = 0.009999999776482582
MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 2.0  # of presence and frequency, either sign
MAX_BIAS = 100.0  # either sign
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_ANSWERS = 1024  # far above the rows of any worker, whose own limit is told when the request is placed
MIN_BEAMS, MAX_BEAMS = 2, 16
MAX_LENGTH_PENALTY = 10.0  # either sign


@dataclass(frozen=True, slots=True)
class Decoding:
    """How many answers a request gets, and how they are searched for."""

    n: int = 1  # answers to return
    best_of: int = 1  # answers to sample; n with beam search
    beam: BeamSearch | None = None

    @property
    def num_indices(self) -> int:
        """Answers that are computed."""
        return self.best_of if self.beam is None else self.beam.width

    @property
    def is_ranked(self) -> bool:
        """Whether the answers are chosen, and so told, at the end."""
        return self.beam is not None or self.best_of > self.n


def check_sampling(
    params: types_pb2.SamplingParams, vocab_size: int, draw_seed: Callable[[], int], violations: Violations
) -> Sampling:
    """The sampling values in effect, without those that other messages hold."""
    checks = _NumberChecks(params, "sampling", violations)
    top_k = 0
    if params.HasField("top_k"):
        top_k = params.top_k
        if not 1 <= top_k <= vocab_size:
            violations.add(
                "sampling.top_k",
                f"is {top_k}; give a count from 1 to the vocabulary size {vocab_size}, or leave it unset to keep all",
            )
        elif top_k == vocab_size:
            top_k = 0
    return Sampling(
        temperature=checks.number("temperature", 0.0, lowest=0.0, highest=MAX_TEMPERATURE, note="; 0 is greedy"),
        top_k=top_k,
        top_p=checks.number("top_p", 1.0, above=0.0, highest=1.0),
        seed=params.seed if params.HasField("seed") else draw_seed(),
        min_p=checks.number("min_p", 0.0, lowest=0.0, highest=1.0),
        repetition_penalty=checks.number(
            "repetition_penalty", 1.0, lowest=MIN_REPETITION_PENALTY, highest=MAX_REPETITION_PENALTY
        ),
        presence_penalty=checks.number("presence_penalty", 0.0, lowest=-MAX_PENALTY, highest=MAX_PENALTY),
        frequency_penalty=checks.number("frequency_penalty", 0.0, lowest=-MAX_PENALTY, highest=MAX_PENALTY),
        logit_bias=_checked_logit_bias(params.logit_bias, vocab_size, violations),
        num_logprobs=checks.count("logprobs", min(MAX_LOGPROBS, vocab_size)),
        num_prompt_logprobs=checks.count("prompt_logprobs", min(MAX_LOGPROBS, vocab_size)),
    )


def check_decoding(params: types_pb2.DecodingParams, sampling: Sampling, violations: Violations) -> Decoding:
    """How many answers, and how; `sampling` as checked before, which beam search restricts."""
    n = params.n if params.HasField("n") else 1
    best_of = params.best_of if params.HasField("best_of") else n
    for name, value in (("n", n), ("best_of", best_of)):
        if params.HasField(name) and not 1 <= value <= MAX_ANSWERS:
            violations.add(f"decoding.{name}", f"is {value}; give a count from 1 to {MAX_ANSWERS}")
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
    """Sampling values in effect, every field set but log-probabilities that were not asked for."""
    return types_pb2.SamplingParams(
        temperature=sampling.temperature,
        # Keeping all is keeping as many as there are: a value that a client may send back.
        top_k=sampling.top_k or vocab_size,
        top_p=sampling.top_p,
        seed=sampling.seed,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.num_logprobs,
        prompt_logprobs=sampling.num_prompt_logprobs,
    )


def decoding_message(decoding: Decoding) -> types_pb2.DecodingParams:
    """Decoding values in effect, every field set; beam_search only for a beam search."""
    message = types_pb2.DecodingParams(n=decoding.n, best_of=decoding.best_of)
    beam = decoding.beam
    if beam is not None:
        message.beam_search.width = beam.width
        message.beam_search.length_penalty = beam.length_penalty
        message.beam_search.early_stopping = beam.early_stopping
    return message


class _NumberChecks:
    """Reads optional numbers of one message: the default where unset, a violation where out of range."""

    def __init__(
        self, params: types_pb2.SamplingParams | types_pb2.BeamSearchParams, path: str, violations: Violations
    ) -> None:
        self._params = params
        self._path = path
        self._violations = violations

    def number(
        self,
        name: str,
        default: float,
        *,
        highest: float,
        lowest: float | None = None,
        above: float | None = None,
        note: str = "",
    ) -> float:
        """One of `lowest` (allowed) and `above` (not allowed) bounds it from below."""
        if not self._params.HasField(name):
            return default
        value: float = getattr(self._params, name)
        # Written so that NaN fails.
        is_low_enough = value <= highest
        if lowest is not None and not (is_low_enough and value >= lowest):
            self._violations.add(
                f"{self._path}.{name}", f"is {value}; give a value from {lowest:g} to {highest:g}{note}"
            )
        elif above is not None and not (is_low_enough and value > above):
            self._violations.add(
                f"{self._path}.{name}", f"is {value}; give a value above {above:g} and at most {highest:g}{note}"
            )
        return value

    def count(self, name: str, highest: int) -> int | None:
        """None where unset."""
        if not self._params.HasField(name):
            return None
        value: int = getattr(self._params, name)
        if value > highest:
            self._violations.add(f"{self._path}.{name}", f"is {value}; give a count from 0 to {highest}")
        return value


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
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            violations.add(
                f"sampling.logit_bias[{token_id}]", f"is {bias}; give a value from {-MAX_BIAS:g} to {MAX_BIAS:g}"
            )
    return tuple(sorted(biases.items()))


def _checked_beam_search(params: types_pb2.BeamSearchParams, violations: Violations) -> BeamSearch:
    if not MIN_BEAMS <= params.width <= MAX_BEAMS:
        violations.add("decoding.beam_search.width", f"is {params.width}; give a count from {MIN_BEAMS} to {MAX_BEAMS}")
    length_penalty = _NumberChecks(params, "decoding.beam_search", violations).number(
        "length_penalty", 1.0, lowest=-MAX_LENGTH_PENALTY, highest=MAX_LENGTH_PENALTY
    )
    return BeamSearch(params.width, length_penalty, params.early_stopping)


_FIELD_BY_SAMPLING = {"num_logprobs": "logprobs", "num_prompt_logprobs": "prompt_logprobs"}


def _refuse_sampling_with_beams(sampling: Sampling, violations: Violations) -> None:
    """A beam search takes the most likely continuations: whatever changes the choice of a token has no meaning."""
    neutral = Sampling()
    for item in fields(Sampling):
        # The seed has no effect, as in greedy decoding; min_tokens is a matter of stopping.
        if item.name not in ("seed", "min_tokens") and getattr(sampling, item.name) != getattr(neutral, item.name):
            name = _FIELD_BY_SAMPLING.get(item.name, item.name)
            violations.add(f"sampling.{name}", "set with decoding.beam_search, which does not sample; leave it unset")
