"""A fleet behind a real port with plan clients in threads: tokens are exact whatever happens to the workers."""

from __future__ import annotations

import asyncio

from tests.fakes.fleet_rig import GrpcRig, expected, make_request, read_all


async def test_base_requests_on_two_workers_give_the_oracles_tokens() -> None:
    async with GrpcRig() as rig:
        await rig.add_worker("w0")
        await rig.add_worker("w1")
        requests = [make_request(rig.fleet, [7 + i, 3, i], 40 + i) for i in range(24)]
        answers = await asyncio.gather(*[read_all(rig.fleet.submit(request)) for request in requests])
        assert answers == [expected(request) for request in requests]
        assert all(snapshot.num_tokens_sampled > 0 for snapshot in rig.fleet.worker_snapshots())
