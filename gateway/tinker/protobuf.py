"""The response of a sample request in protobuf's wire format, which is all that the SDK accepts for it.

Fields, by number; arrays are bytes, least significant first:

    SampleResponse  1 sequences (SampledSequence, repeated)   2 prompt_logprobs (float32)
                    3 topk_prompt_logprobs (TopkLogprobs)     4 prompt_cache_hit_tokens
    SampledSequence 1 stop_reason (0 stop, 1 length)  2 tokens (int32)  3 logprobs (float32)  4 topk (TopkLogprobs)
    TopkLogprobs    1 token_ids (int32)  2 logprobs (float32)  3 k  4 length
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from motet import FinishReason, Generation, TokenLogprobs

_VARINT, _BYTES = 0, 2
# How a row of top tokens that was not computed is filled.
_NO_TOKEN, _NO_LOGPROB = 0, -99999.0


def sample_response(
    generation: Generation,
    *,
    num_top: int,
    prompt: Sequence[TokenLogprobs] | None,
    num_prompt_top: int,
    last_n: int | None,
    with_prompt_logprobs: bool,
) -> bytes:
    """A SampleResponse.

    `prompt`: log-probabilities of the prompt's tokens from the second on; None: not requested. Only the last `last_n`
    of them are shown.
    """
    out = bytearray()
    for completion in generation.completions:
        tokens = completion.token_ids
        sequence = bytearray()
        _add_number(sequence, 1, int(completion.finished.finish_reason is FinishReason.LENGTH))
        _add_bytes(sequence, 2, _int32(tokens))
        _add_bytes(sequence, 3, _float32([one.logprob for one in completion.logprobs]))
        if num_top:
            _add_bytes(sequence, 4, _topk(completion.logprobs, num_top, num_hidden=0))
        _add_bytes(out, 1, bytes(sequence))
    if prompt is not None:
        # Position 0 has nothing before it; hidden ones were not requested.
        num_hidden = 1 + (0 if last_n is None else max(0, len(prompt) - last_n))
        shown = prompt[num_hidden - 1 :]
        if with_prompt_logprobs:
            _add_bytes(out, 2, _float32([*[math.nan] * num_hidden, *(one.logprob for one in shown)]))
        if num_prompt_top:
            _add_bytes(out, 3, _topk(shown, num_prompt_top, num_hidden=num_hidden))
    _add_number(out, 4, generation.started.cached_tokens)
    return bytes(out)


def _topk(positions: Sequence[TokenLogprobs], num_top: int, *, num_hidden: int) -> bytes:
    ids, logprobs = [_NO_TOKEN] * (num_hidden * num_top), [_NO_LOGPROB] * (num_hidden * num_top)
    for position in positions:
        num_missing = num_top - len(position.top)
        ids += [*(one.token_id for one in position.top), *[_NO_TOKEN] * num_missing]
        logprobs += [*(one.logprob for one in position.top), *[_NO_LOGPROB] * num_missing]
    out = bytearray()
    _add_bytes(out, 1, _int32(ids))
    _add_bytes(out, 2, _float32(logprobs))
    _add_number(out, 3, num_top)
    _add_number(out, 4, num_hidden + len(positions))
    return bytes(out)


def _int32(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def _float32(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _add_number(out: bytearray, field: int, value: int) -> None:
    if value:  # zero is what an absent field means
        out += _varint(field << 3 | _VARINT) + _varint(value)


def _add_bytes(out: bytearray, field: int, value: bytes) -> None:
    out += _varint(field << 3 | _BYTES) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
