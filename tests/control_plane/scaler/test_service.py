"""The scaler's port, called as KEDA calls it: with stubs of KEDA's proto, over a real connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from control_plane.access.settings import AccessSettings
from control_plane.access.transport import Transport, open_transport
from control_plane.access.watched_files import FileWatcher
from control_plane.api.rpc import listeners
from control_plane.caller import Caller
from control_plane.errors import MotetError
from control_plane.scaler.service import ScalerService
from control_plane.scaler.v1 import externalscaler_pb2 as keda, externalscaler_pb2_grpc
from tests.control_plane.api.fakes import details
from tests.fakes.authority import LOCALHOST, Authority, Issued
from tests.fakes.fleet_rig import FakeClock, InspectedFleet, LoopbackWorker, make_fleet, make_request
from tests.fakes.fleet_steps import run_all

CA = Authority()
KEDAS, STRANGERS = CA.issue("keda-operator"), Authority().issue("keda-operator")
TIMEOUT_S = 30.0
OBJECT = keda.ScaledObjectRef(
    name="motet-worker", namespace="motet", scalerMetadata={"scalerAddress": "motet-control-plane:50053"}
)


class Turns:
    """A sleep that lasts until the test says so."""

    def __init__(self) -> None:
        self._woken = asyncio.Event()
        self.sleeping = asyncio.Event()

    async def sleep(self, _seconds: float) -> None:
        self.sleeping.set()
        await self._woken.wait()
        self._woken.clear()

    async def next(self) -> None:
        """Wait until the stream sleeps, and have it look again."""
        await asyncio.wait_for(self.sleeping.wait(), TIMEOUT_S)
        self.sleeping.clear()
        self._woken.set()


@contextlib.asynccontextmanager
async def scaler(
    service: ScalerService, transport: Transport | None = None, own: Issued | None = None, refused: Any = None
) -> AsyncIterator[Any]:
    """A stub of KEDA's. `refused`: a list that gets the errors."""

    def on_refused(_method: str, _caller: Caller, error: MotetError) -> None:
        refused.append(error)

    transport = transport or Transport()
    server = listeners.scaler_server(guard=transport.scaler_guard, on_refused=None if refused is None else on_refused)
    externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(service, server)
    address = listeners.bind(server, "localhost:0", transport.scaler_credentials)
    await server.start()
    options = [("grpc.use_local_subchannel_pool", 1)]
    if transport.scaler_credentials is None:
        channel = grpc.aio.insecure_channel(address, options)
    else:
        channel = grpc.aio.secure_channel(address, CA.channel_credentials(own), options)
    try:
        async with channel:
            yield externalscaler_pb2_grpc.ExternalScalerStub(channel)
    finally:
        await server.stop(None)


def waiting_fleet() -> InspectedFleet:
    return make_fleet(FakeClock(), worker_start_s=60.0)


async def test_the_scaler_is_active_while_a_request_is_unfinished() -> None:
    fleet = waiting_fleet()
    async with scaler(ScalerService(fleet.workload)) as stub:
        assert not (await stub.IsActive(OBJECT, timeout=TIMEOUT_S)).result
        stream = fleet.submit(make_request(fleet, [1], 5))
        assert (await stub.IsActive(OBJECT, timeout=TIMEOUT_S)).result
        await run_all(LoopbackWorker(fleet), [stream])
        assert not (await stub.IsActive(OBJECT, timeout=TIMEOUT_S)).result


async def test_keda_is_sent_the_state_at_once_and_then_each_change() -> None:
    fleet, turns = waiting_fleet(), Turns()
    async with scaler(ScalerService(fleet.workload, sleep=turns.sleep)) as stub:
        call = stub.StreamIsActive(OBJECT, timeout=TIMEOUT_S)
        assert not (await call.read()).result
        await turns.next()  # nothing has changed: nothing is sent
        stream = fleet.submit(make_request(fleet, [1], 5))
        await turns.next()
        assert (await call.read()).result
        await run_all(LoopbackWorker(fleet), [stream])
        await turns.next()
        assert not (await call.read()).result
        call.cancel()


async def test_a_worker_is_wanted_before_the_model_is_known() -> None:
    """Without it no request could be checked, so none would wait, and no worker would ever start."""
    fleet, known = waiting_fleet(), list[str]()
    async with scaler(ScalerService(fleet.workload, is_model_known=lambda: bool(known))) as stub:
        assert (await stub.IsActive(OBJECT, timeout=TIMEOUT_S)).result
        known.append("longest context")
        assert not (await stub.IsActive(OBJECT, timeout=TIMEOUT_S)).result


async def test_metrics_have_targets_and_values() -> None:
    fleet = waiting_fleet()
    worker = LoopbackWorker(fleet)  # of 16 rows
    streams = [fleet.submit(make_request(fleet, [index], 5)) for index in range(20)]
    async with scaler(ScalerService(fleet.workload)) as stub:
        wanted = keda.ScaledObjectRef(name="w", scalerMetadata={"motetTargetLoad": "0.5", "motetTargetWaiting": "2.5"})
        specs = (await stub.GetMetricSpec(wanted, timeout=TIMEOUT_S)).metricSpecs
        assert [(spec.metricName, spec.targetSize, spec.targetSizeFloat) for spec in specs] == [
            ("motet-wanted-workers", 1, 1.0),
            ("motet-requests-waiting", 3, 2.5),
        ]
        (value,) = (await _metric(stub, wanted, "motet-wanted-workers")).metricValues
        assert (value.metricName, value.metricValue, value.metricValueFloat) == ("motet-wanted-workers", 3, 2.5)
        (value,) = (await _metric(stub, wanted, "motet-requests-waiting")).metricValues
        assert value.metricValueFloat == value.metricValue
    await run_all(worker, streams)


async def test_wrong_metadata_and_unknown_metrics_are_refused_by_every_method() -> None:
    wrong = keda.ScaledObjectRef(name="w", scalerMetadata={"motetTargetLoad": "9"})
    refused: list[MotetError] = []
    async with scaler(ScalerService(waiting_fleet().workload), refused=refused) as stub:
        calls = [stub.IsActive(wrong), stub.GetMetricSpec(wrong), _metric(stub, wrong, "motet-wanted-workers")]
        calls += [stub.StreamIsActive(wrong).read(), _metric(stub, OBJECT, "s0-cpu")]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert details(caught.value)[1] in (["scalerMetadata"], ["metricName"])
    assert len(refused) == len(calls)


async def test_the_method_that_later_versions_of_keda_try_is_unimplemented() -> None:
    """KEDA then goes on without it; any other status would have it try again for ever."""
    service = ScalerService(waiting_fleet().workload)
    server = listeners.scaler_server()
    externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(service, server)
    address = listeners.bind(server, "127.0.0.1:0")
    await server.start()
    channel: Any
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_stream("/externalscaler.ExternalScaler/StreamMetricSpec")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"", timeout=TIMEOUT_S).read()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(None)


async def test_over_tls_only_a_certificate_of_the_listed_authority_is_let_in(tmp_path: Path) -> None:
    cert, key = CA.issue(*LOCALHOST).write(tmp_path)
    settings = AccessSettings(tls_cert=cert, tls_key=key, scaler_tls_client_ca=CA.write(tmp_path))
    service = ScalerService(waiting_fleet().workload)
    async with scaler(service, open_transport(settings, FileWatcher(), has_scaler=True), KEDAS) as stub:
        assert not (await stub.IsActive(OBJECT, timeout=TIMEOUT_S)).result
    for own in (None, STRANGERS):
        async with scaler(service, open_transport(settings, FileWatcher(), has_scaler=True), own) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.IsActive(OBJECT, timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_on_the_deny_list_is_refused(tmp_path: Path) -> None:
    cert, key = CA.issue(*LOCALHOST).write(tmp_path)
    denied = tmp_path / "denied"
    denied.write_text(f"sha256:{KEDAS.fingerprint}\n")
    ca = CA.write(tmp_path)
    settings = AccessSettings(tls_cert=cert, tls_key=key, scaler_tls_client_ca=ca, tls_deny=denied)
    transport = open_transport(settings, FileWatcher(), has_scaler=True)
    async with scaler(ScalerService(waiting_fleet().workload), transport, KEDAS) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.IsActive(OBJECT, timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def _metric(stub: Any, of: keda.ScaledObjectRef, name: str) -> Any:
    return await stub.GetMetrics(keda.GetMetricsRequest(scaledObjectRef=of, metricName=name), timeout=TIMEOUT_S)
