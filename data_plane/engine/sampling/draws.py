"""Tokens and log-probabilities of a step's rows from its logits. Rows with vocabularies of one size go together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from data_plane.constraints.masks import Masks, forbid, maskable
from data_plane.engine.rows import BoolArray, Int64Array, Rows
from data_plane.engine.sampling.logprobs import LogprobsRequest, compute_logprobs
from data_plane.engine.sampling.sampler import Sampler
from data_plane.plan import Int32Array, RowLogprobs
from kernels.devices import upload


class _Group(NamedTuple):
    """Rows of a step whose vocabularies have one size."""

    size: int
    indices: Int64Array
    there: torch.Tensor  # the same on the device


class Draws:
    """Draws for the rows of an engine."""

    def __init__(self, rows: Rows, sampler: Sampler) -> None:
        self._rows = rows
        self._sampler = sampler
        # Of the last step whose rows have vocabularies of several sizes: these sizes as bytes, and its groups.
        self._last_groups: tuple[bytes, list[_Group]] = (b"", [])

    def are_free(self, rows: Int64Array) -> BoolArray:
        """bool [n]: whether what is drawn for a row does not change what it is drawn by next, and is all that it
        returns."""
        return ~self._sampler.has_history(rows) & (self._sampler.num_logprobs[rows] < 0)

    def draw(
        self,
        logits: torch.Tensor,
        sampled: Int64Array,
        masks: Masks | None,
        index_there: torch.Tensor | None = None,
        *,
        ahead: Int64Array | int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, whether the logits are finite (see Sampler.sample), and the logits whose log-probabilities are
        returned. Nothing waits for the device. `index_there`: see Decoded.completion_index. `ahead` [n]: how many
        tokens come between a row's last one and that which is drawn; a row without a history may be drawn for several
        times."""
        positions = self._rows.num_known[sampled] - self._rows.num_prompt[sampled] + ahead
        num_tokens = self._rows.num_tokens[sampled]
        logits = logits if masks is None else maskable(logits)
        returned, were_finite = logits, None
        if masks is not None:
            self._sampler.lift_bans(masks.lifted)
            if (self._sampler.num_logprobs[sampled[masks.indices]] >= 0).any():
                returned = logits.to(torch.float32, copy=True)
            were_finite = forbid(logits, masks)
        if (num_tokens == logits.shape[1]).all():
            processed = self._sampler.processed_logits(logits, sampled, positions)
            tokens, finite = self._sampler.sample(logits, sampled, positions, index_there)
            if processed is not None:
                returned = _replaced(returned, logits, upload(processed[0], logits.device), processed[1])
        else:
            tokens = torch.zeros(len(sampled), dtype=torch.int64, device=logits.device)
            finite = torch.zeros(len(sampled), dtype=torch.bool, device=logits.device)
            for size, indices, there in self._groups(num_tokens, logits.device):
                own, rows, at = logits[there, :size], sampled[indices], positions[indices]
                at_there = None if index_there is None else index_there.index_select(0, there)
                processed = self._sampler.processed_logits(own, rows, at)
                tokens[there], finite[there] = self._sampler.sample(own, rows, at, at_there)
                if processed is not None:
                    chosen = upload(indices[processed[0]], logits.device)
                    returned = _replaced(returned, logits, chosen, processed[1])
        if masks is not None and were_finite is not None:
            finite[upload(masks.indices, logits.device)] &= were_finite
        return tokens, finite, returned

    def _groups(self, num_tokens: Int64Array, device: torch.device) -> list[_Group]:
        """The rows by the size of their vocabulary, uploaded when they change."""
        key = num_tokens.tobytes()
        if self._last_groups[0] != key:
            self._last_groups = key, [_Group(size, at, upload(at, device)) for size, at in _by_size(num_tokens)]
        return self._last_groups[1]

    def sampled_logprobs(
        self, logits: torch.Tensor, sampled: Int64Array, token_ids: Int32Array, is_finite: BoolArray
    ) -> list[RowLogprobs]:
        """Of the tokens that these rows sampled, noted already: of each row that returns log-probabilities and whose
        logits were finite. Waits for the device where there is such a row."""
        num_top = self._sampler.num_logprobs[sampled]
        indices = np.flatnonzero((num_top >= 0) & is_finite)
        if len(indices) == 0:
            return []
        requests = [
            LogprobsRequest(int(row), int(self._rows.num_known[row]) - 1, token_ids[i : i + 1], int(num_top[i]))
            for i, row in zip(indices.tolist(), sampled[indices].tolist(), strict=True)
        ]
        return self.logprobs(logits[upload(indices, logits.device)], requests)

    def logprobs(self, logits: torch.Tensor, requests: list[LogprobsRequest]) -> list[RowLogprobs]:
        """compute_logprobs, over the vocabulary of each request's row. Waits for the device."""
        num_tokens = self._rows.num_tokens[np.array([request.row for request in requests], dtype=np.int64)]
        if (num_tokens == logits.shape[1]).all():
            return compute_logprobs(logits, requests)
        counts = np.array([len(request.token_ids) for request in requests])
        groups = np.repeat(np.arange(len(requests)), counts)
        found: list[RowLogprobs] = []
        for size, indices in _by_size(num_tokens):
            there = upload(np.flatnonzero(np.isin(groups, indices)), logits.device)
            found += compute_logprobs(logits[there, :size], [requests[index] for index in indices.tolist()])
        order = {request.row: index for index, request in enumerate(requests)}
        return sorted(found, key=lambda part: order[part.row])


def _replaced(
    returned: torch.Tensor, logits: torch.Tensor, rows: torch.Tensor, processed: torch.Tensor
) -> torch.Tensor:
    """`returned` with other logits in these rows; a copy where it is `logits` still."""
    if returned is logits:
        returned = logits.to(torch.float32, copy=True)
    returned[rows, : processed.shape[1]] = processed
    return returned


def _by_size(num_tokens: Int64Array) -> list[tuple[int, Int64Array]]:
    """Sizes of vocabularies, each with the indices that have it."""
    return [(size, np.flatnonzero(num_tokens == size)) for size in np.unique(num_tokens).tolist()]
