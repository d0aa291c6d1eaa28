"""KEDA's ExternalScaler over the workload of the fleet.

KEDA starts the first worker when the scaler is active, and ends the last one when it is not. Between them a
HorizontalPodAutoscaler follows the metrics.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import grpc.aio

from control_plane.fleet.workload import FleetWorkload
from control_plane.scaler.targets import read_targets
from control_plane.scaler.v1 import externalscaler_pb2, externalscaler_pb2_grpc

LOOK_S = 0.25  # between two looks of StreamIsActive; a worker takes many times as long to start
Context = grpc.aio.ServicerContext[Any, Any]


class ScalerService(externalscaler_pb2_grpc.ExternalScalerServicer):
    """See protos/keda/externalscaler.proto."""

    # The stubs name the methods, and KEDA the fields.
    # ruff: noqa: N802

    def __init__(
        self,
        workload: FleetWorkload,
        is_model_known: Callable[[], bool] = lambda: True,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`is_model_known`: whether requests can be checked. If not, only a worker can say what the model computes."""
        self._workload = workload
        self._is_model_known = is_model_known
        self._sleep = sleep

    @property
    def _is_active(self) -> bool:
        return self._workload.is_active or not self._is_model_known()

    async def IsActive(
        self, request: externalscaler_pb2.ScaledObjectRef, _context: Context
    ) -> externalscaler_pb2.IsActiveResponse:
        """Whether a request runs or waits."""
        read_targets(request.scalerMetadata)
        return externalscaler_pb2.IsActiveResponse(result=self._is_active)

    async def StreamIsActive(
        self, request: externalscaler_pb2.ScaledObjectRef, _context: Context
    ) -> AsyncGenerator[externalscaler_pb2.IsActiveResponse, None]:
        """IsActive at once, and after each change that lasts for LOOK_S."""
        read_targets(request.scalerMetadata)
        sent: bool | None = None
        while True:
            if (is_active := self._is_active) != sent:
                yield externalscaler_pb2.IsActiveResponse(result=is_active)
                sent = is_active
            await self._sleep(LOOK_S)

    async def GetMetricSpec(
        self, request: externalscaler_pb2.ScaledObjectRef, _context: Context
    ) -> externalscaler_pb2.GetMetricSpecResponse:
        """The metrics of the ScaledObject."""
        return externalscaler_pb2.GetMetricSpecResponse(
            metricSpecs=[
                externalscaler_pb2.MetricSpec(metricName=name, targetSize=math.ceil(target), targetSizeFloat=target)
                for name, target in read_targets(request.scalerMetadata).specs()
            ]
        )

    async def GetMetrics(
        self, request: externalscaler_pb2.GetMetricsRequest, _context: Context
    ) -> externalscaler_pb2.GetMetricsResponse:
        """One of them at this moment."""
        targets = read_targets(request.scaledObjectRef.scalerMetadata)
        value = targets.value(request.metricName, self._workload.now())
        return externalscaler_pb2.GetMetricsResponse(
            metricValues=[
                externalscaler_pb2.MetricValue(
                    metricName=request.metricName, metricValue=math.ceil(value), metricValueFloat=value
                )
            ]
        )
