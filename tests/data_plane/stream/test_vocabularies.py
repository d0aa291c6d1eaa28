"""What a session does with a vocabulary of constraints."""

from __future__ import annotations

from contract.v1 import plan_pb2
from tests.data_plane.stream.test_plan_client import Peer, ints, one_row, plan, play
from tests.fakes.fleet_rig import ThreadedWorker


async def test_a_vocabulary_is_read_when_it_comes_and_not_by_a_step() -> None:
    async def script(peer: Peer) -> None:
        await peer.welcome(1)
        await peer.send(
            put_vocabulary=plan_pb2.PutVocabulary(digest="v", tokenizer="{}", num_tokens=9, end_token_ids=ints(0))
        )
        await peer.send(step_plan=plan(1, 1, **one_row()))
        await peer.receive("step_result")
        assert seen[0].engine.read_digests == ["v"]

    seen: list[ThreadedWorker] = []
    await play(script, on_worker=seen.append)
