"""The rows of a beam search: which member of the group computes which beam.

The group holds `width` rows from its admission to its end, and in each of them at least one block. A beam goes on in
the row of its parent, where it is fed its token. If a parent has several children, the others fork from it (forks.py)
in the rows of beams that were dropped. Those rows keep one block for that purpose, so that a fork never waits for a
block. The search advances when the results of all beams have come; until then nothing more of the group is planned.
"""

from __future__ import annotations

from control_plane.scheduler.requests.beam_search import BeamSearcher
from control_plane.scheduler.requests.sequence import Sequence, SequenceGroup
from control_plane.scheduler.requests.states import SequenceState
from control_plane.scheduler.requests.transitions import move_row
from control_plane.scheduler.step.forks import share_blocks
from control_plane.scheduler.step.worker_state import WorkerState
from control_plane.scheduler.types import FinishReason, RequestOutput

# Score of an index without a hypothesis: the vocabulary has too few tokens that may be chosen.
NO_SCORE = -1e9


def advance(group: SequenceGroup, searcher: BeamSearcher, worker: WorkerState) -> None:
    """Advance the search by the results of all its beams, and its sequences with it."""
    old = group.beam_sequences
    parents = searcher.advance(group.take_candidates())
    if not parents:
        group.go_on_with([])
        return
    survivors = [old[parent] for parent in parents]
    unused = [member for member in group.members if member not in survivors]
    for member in unused:
        if member.state is not SequenceState.RESERVED:
            worker.rows.reserve_again(member)
    new: list[Sequence] = []
    for beam, source in zip(searcher.beams, survivors, strict=True):
        if source not in new:
            new.append(source)
            continue
        fork = unused.pop(0)
        fork.follow(source, beam.last_token_id)
        row = fork.held_row
        share_blocks(source.held_row, row, fork.num_known - 1, worker)
        move_row(row, SequenceState.FORKING)
        new.append(fork)
    for beam, sequence in zip(searcher.beams, new, strict=True):
        if sequence.state is not SequenceState.FORKING:
            sequence.append_chosen(beam.last_token_id)
    group.go_on_with(new)
    worker.rows.regroup()


def outputs_of(group: SequenceGroup, searcher: BeamSearcher) -> list[RequestOutput]:
    """The outputs of a search that is over: every hypothesis, the best first."""
    outputs: list[RequestOutput] = []
    for index in range(searcher.search.width):
        output = group.output([], FinishReason.LENGTH)
        output.index, output.score, output.num_searched = index, NO_SCORE, group.num_searched
        if index < len(searcher.hypotheses):
            hypothesis = searcher.hypotheses[index]
            output.token_ids, output.score = list(hypothesis.token_ids), hypothesis.score
            if hypothesis.token_ids[-1] in group.request.stop_token_ids:
                output.finish_reason = FinishReason.STOP_TOKEN
        outputs.append(output)
    return outputs
