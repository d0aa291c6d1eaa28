"""Log-probabilities of many positions, packed: 12 bytes for each and 8 for each candidate, not an object of 2 kB.

Those of a prompt are kept until its last chunk is computed and until the client reads. They are sequences whose entries
are made on request.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position under the model's own distribution: before bias, penalties and filters."""

    token_id: int
    logprob: float  # natural logarithm
    rank: int  # tokens that were more likely, plus one
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), the most likely first, equal ones by token id


class _MadeOnRequest(Sequence[TokenLogprobs]):
    """A sequence that makes its entries on request, and equals any sequence of the same entries."""

    @abstractmethod
    def _made(self, start: int, stop: int) -> list[TokenLogprobs]:
        """The entries of these positions."""

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprobs]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | list[TokenLogprobs]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self._made(start, max(start, stop))[::step]
        start = range(len(self))[index]  # raises IndexError
        return self._made(start, start + 1)[0]

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == list(other)

    __hash__ = None  # type: ignore[assignment]  # as a list


@dataclass(frozen=True, slots=True, eq=False)
class PackedLogprobs(_MadeOnRequest):
    """Log-probabilities of consecutive positions, as a worker returned them."""

    token_ids: npt.NDArray[np.int32]  # [n]
    logprobs: npt.NDArray[np.float32]  # [n]
    ranks: npt.NDArray[np.int32]  # [n]
    top_token_ids: npt.NDArray[np.int32]  # [n * candidates]
    top_logprobs: npt.NDArray[np.float32]  # [n * candidates]
    num_top: int  # candidates of each position

    def __len__(self) -> int:
        return len(self.token_ids)

    def _made(self, start: int, stop: int) -> list[TokenLogprobs]:
        here, tops_here = slice(start, stop), slice(start * self.num_top, stop * self.num_top)
        tops = zip(self.top_token_ids[tops_here].tolist(), self.top_logprobs[tops_here].tolist(), strict=True)
        top_by_position = zip(*[tops] * self.num_top, strict=True) if self.num_top else [()] * (stop - start)
        columns = (self.token_ids[here].tolist(), self.logprobs[here].tolist(), self.ranks[here].tolist())
        return [TokenLogprobs(*entry) for entry in zip(*columns, top_by_position, strict=True)]


@dataclass(slots=True, eq=False)
class PromptLogprobs(_MadeOnRequest):
    """Log-probabilities of a prompt, which come chunk by chunk."""

    _chunks: list[Sequence[TokenLogprobs]] = field(default_factory=list)
    _num_positions: int = 0

    def extend(self, chunk: Sequence[TokenLogprobs]) -> None:
        """Append the next positions."""
        self._chunks.append(chunk)
        self._num_positions += len(chunk)

    def __len__(self) -> int:
        return self._num_positions

    def _made(self, start: int, stop: int) -> list[TokenLogprobs]:
        found: list[TokenLogprobs] = []
        for chunk in self._chunks:
            if start < len(chunk) and stop > 0:
                found += chunk[max(start, 0) : stop]
            start, stop = start - len(chunk), stop - len(chunk)
        return found
