"""The deltas of a completion that is sent when the request ends, held as the bytes that will be sent.

As objects, tokens with 20 candidates take 2.5 kB each and tens of microseconds to make a message of; a request for 64
samples may hold half a million of them. The messages are made while the tokens come, and kept encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from motet.v1 import generation_pb2

from control_plane.api.wire import add_logprobs
from control_plane.scheduler.types import TokenLogprobs

MAX_DELTA_TOKENS = 256
MAX_DELTA_LOGPROBS = 2048  # log-probabilities in one delta, candidates included


class KeptDeltas:
    """The deltas of one completion, in order."""

    def __init__(self, spell: Callable[[int], bytes] | None = None) -> None:
        """`spell`: the bytes of a token, where they are returned with log-probabilities."""
        self._spell = spell
        self._encoded: list[bytes] = []
        self._open: generation_pb2.GenerateResponse | None = None  # its delta may still grow
        self._num_open_logprobs = 0
        self._num_tokens = 0

    def add(self, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs] | None) -> None:
        """Append tokens, at most as many as one delta may have, and the text that they made final."""
        if not token_ids and not text:
            return
        num_logprobs = sum(1 + len(entry.top) for entry in logprobs or ())
        if self._open is not None and (
            len(self._open.delta.token_ids) + len(token_ids) > MAX_DELTA_TOKENS
            or self._num_open_logprobs + num_logprobs > MAX_DELTA_LOGPROBS
        ):
            self._seal()
        if self._open is None:
            self._open = generation_pb2.GenerateResponse()
            self._open.delta.token_offset = self._num_tokens
        delta = self._open.delta
        delta.token_ids.extend(token_ids)
        delta.text += text
        self._num_tokens += len(token_ids)
        delta.completion_tokens = self._num_tokens
        if logprobs:
            add_logprobs(delta.logprobs, logprobs, self._spell)
            self._num_open_logprobs += num_logprobs

    def messages(self, index: int) -> Iterator[generation_pb2.GenerateResponse]:
        """The deltas, each made when the caller takes it. `index` is the completion's place among those returned."""
        self._seal()
        for encoded in self._encoded:
            message = generation_pb2.GenerateResponse.FromString(encoded)
            if index:
                message.delta.index = index
            yield message

    @property
    def num_bytes(self) -> int:
        """Bytes held, but for the delta that may still grow."""
        return sum(map(len, self._encoded))

    def _seal(self) -> None:
        if self._open is not None:
            self._encoded.append(self._open.SerializeToString())
            self._open, self._num_open_logprobs = None, 0
