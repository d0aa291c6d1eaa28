"""What vLLM responds and what Motet responds to the same requests, of the same checkpoint, line by line.

Every difference is in `differences.py` with its reason; a difference that is gone fails, too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.clients.chained_checkpoint import make_chained_checkpoint
from tests.clients.conformance.cases import CASES
from tests.clients.conformance.differences import DIFFERENCES, reason_of
from tests.clients.conformance.record import RECORDED
from tests.clients.conformance.shapes import shape_of
from tests.clients.served_api import FLAGS
from tests.e2e.harness import System
from tests.gateway.gateway_process import Gateway
from tests.makers import make_adapter

VLLM: dict[str, list[str]] = json.loads(RECORDED.read_text())["shapes"]


@pytest.fixture(scope="module")
def motet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    directory = tmp_path_factory.mktemp("conformance")
    yield motet_shapes(directory)


def motet_shapes(directory: Path) -> dict[str, list[str]]:
    """The shape of each case, as the gateway responds."""
    checkpoint = make_chained_checkpoint(directory / "chained")
    adapter = make_adapter(directory / "plain", checkpoint, rank=2, targets=["q_proj"])
    with System(checkpoint, directory) as system:
        system.start_worker(flags=FLAGS)
        system.client().adapters.register("plain", adapter)
        with (
            Gateway(system.address, directory) as gateway,
            httpx.Client(base_url=gateway.url, timeout=120) as client,
        ):
            return {name: shape_of(client, case) for name, case in CASES.items()}


def differences(name: str, ours: list[str], theirs: list[str]) -> list[str]:
    """Lines of one only: "- line" of vLLM, "+ line" of Motet. Only the keys are in an order of no meaning."""
    lines = [f"- {line}" for line in theirs if line not in ours] + [f"+ {line}" for line in ours if line not in theirs]
    order = [[line for line in shape if line.startswith("order ")] for shape in (theirs, ours)]
    if not lines and order[0] != order[1]:
        lines.append(f"order {order}")
    return [f"{name} {line}" for line in lines]


def test_every_case_was_recorded() -> None:
    assert VLLM.keys() == CASES.keys()


def test_every_difference_is_known_and_every_known_one_is_there(motet: dict[str, list[str]]) -> None:
    found = [line for name in CASES for line in differences(name, motet[name], VLLM[name])]
    unknown = [line for line in found if reason_of(line) is None]
    assert not unknown, "\n".join(unknown)
    uses = Counter(reason_of(line) for line in found)
    gone = [difference for difference in DIFFERENCES if not uses[difference.reason]]
    assert not gone
