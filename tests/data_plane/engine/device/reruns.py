"""A recorder of step graphs for machines without CUDA: a replay runs the step again over the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from data_plane.engine.device.step_graphs import Graph

Body = Callable[[], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Reruns:
    """Recorder (see step_graphs). `num_replays` counts."""

    num_replays: int = 0

    def record(self, body: Body) -> Graph:
        return Rerun(self, body, body())


@dataclass
class Rerun:
    """One recorded step."""

    owner: Reruns
    body: Body
    outputs: tuple[torch.Tensor, torch.Tensor]

    def replay(self) -> None:
        for kept, result in zip(self.outputs, self.body(), strict=True):
            kept.copy_(result)
        self.owner.num_replays += 1
