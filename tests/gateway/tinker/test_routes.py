"""What the routes return for outcomes that a healthy system does not give, and for routes that are not served."""

from __future__ import annotations

import httpx
import pytest
from motet import InvalidArgument, ResourceExhausted, Unavailable

from gateway.config import GatewayConfig
from gateway.http.bodies import Bodies
from gateway.http.keys import current_owner
from gateway.http.settings import HttpSettings
from gateway.http.siblings import Place, Siblings
from gateway.http.upstream import Upstream
from gateway.tinker.futures import Futures
from gateway.tinker.routes import TRAINING, tinker_app, tinker_routes
from gateway.tinker.samples import Samples

SAMPLING = f"motet-{'0' * 32}:sample:0:base"
SAMPLE = {"prompt": {"chunks": [{"tokens": [5], "type": "encoded_text"}]}, "sampling_params": {"max_tokens": 1}}
SAMPLE |= {"sampling_session_id": SAMPLING, "seq_id": 0}


class Rig:
    """The protocol without a server behind it; requests have the outcome that the test starts them with."""

    def __init__(self) -> None:
        config = GatewayConfig(http=HttpSettings(server_absence_s=0.0, server="127.0.0.1:1"))
        self.futures = Futures(config.tinker)
        self.upstream = Upstream(config.http)
        bodies = Bodies(1 << 20)
        samples = Samples(self.upstream, self.futures, bodies, Siblings(Place()), 10.0)
        app = tinker_app(tinker_routes(self.upstream, samples, bodies, config.http.base_model_names))
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")

    async def post(self, path: str, body: dict[str, object]) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def __aenter__(self) -> Rig:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        await self.futures.close()
        await self.upstream.close()


@pytest.mark.parametrize(
    ("error", "status", "category"),
    [
        (ResourceExhausted("the queue is full", retry_after_s=1.0), 410, None),
        (ResourceExhausted("the message is too large"), 200, "server"),
        (InvalidArgument("sampling.top_p is 2"), 200, "user"),
        (Unavailable("nobody is there"), 200, "server"),
        (ValueError("our own mistake"), 200, "server"),  # to a 5xx the SDK repeats its poll at once, for ever
    ],
)
async def test_an_error_fails_the_sample_or_has_it_sent_again(error: Exception, status: int, category: str) -> None:
    async def work() -> bytes:
        raise error

    async with Rig() as rig:
        assert (await rig.post("cancel_future", {"request_id": "r"})).status_code == 200, "none to cancel"
        rig.futures.start("r", current_owner(), work)
        response = await rig.post("retrieve_future", {"request_id": "r"})
        assert response.status_code == status and response.json().get("category") == category


async def test_an_unknown_request_is_sent_again() -> None:
    async with Rig() as rig:
        assert (await rig.post("retrieve_future", {"request_id": "r"})).status_code == 410


@pytest.mark.parametrize("name", TRAINING)
async def test_every_route_of_training_is_refused_by_name(name: str) -> None:
    async with Rig() as rig:
        response = await rig.post(name, {"anything": 1})
        assert response.status_code == 400 and response.json()["detail"].startswith(f"{name}: Motet serves")


async def test_a_route_that_is_not_served_says_which_are() -> None:
    async with Rig() as rig:
        response = await rig.http.get("training_runs")
        assert response.status_code == 404 and "asample" in response.json()["detail"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sampling_session_id": None}, "create a sampling session first"),
        ({"model_path": "tinker://legal"}, "model_path: is not read here"),
        ({"base_model": "model"}, "base_model: is not read here"),
        (
            {"prompt": {"chunks": [{"tokens": [5], "type": "encoded_text", "data": [1]}]}},
            "prompt.chunks[0]: has more than tokens",
        ),
        ({"record_stability_info": True}, "record_stability_info: is not served"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n: is 1"),
        ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs: is -1"),
        ({"num_samples": 0}, "num_samples: is 0; give 1 to 1024"),
        ({"num_samples": 2**40}, "num_samples: is 1099511627776"),  # each would get an id in the response
        ({"seq_id": -1}, "seq_id: -1 is not from 0"),
        ({"seq_id": 10**4000}, "seq_id: 1000000"),
        ({"sampling_params": {"stop": ["a", 5]}}, "sampling_params.stop: has texts and token ids"),
        ({"sampling_params": {"min_p": 0.5}}, "unknown field `min_p`"),
        ({"beams": 3}, "unknown field `beams`"),
    ],
)
async def test_a_sample_request_that_cannot_be_served_is_refused_with_the_field(
    change: dict[str, object], said: str
) -> None:
    async with Rig() as rig:
        response = await rig.post("asample", {**SAMPLE, **change})
        assert response.status_code == 400 and said in response.json()["detail"]
        assert len(rig.futures) == 0
