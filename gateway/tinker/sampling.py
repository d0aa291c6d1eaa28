"""One sample request, in Motet's terms: what is refused, what is sent, and how the response is made of what comes back.

Log-probabilities of sampled tokens are of the distribution that they were drawn from, after temperature, top_k and
top_p: what importance weights need. Those of the prompt are the model's own, since a prompt is not drawn.
"""

from __future__ import annotations

import asyncio
import secrets

from motet import AsyncClient, GenerateOptions, Generation

from gateway.http.errors import Refusal
from gateway.tinker.messages import SampleRequest, SamplingParams
from gateway.tinker.protobuf import sample_response
from gateway.tinker.sessions import Source

MAX_NUM_SAMPLES = 1024  # Motet's bound; each has an id in the response of `asample`


def prompt_of(request: SampleRequest) -> list[int]:
    """The token ids of the prompt. Raises Refusal for anything that is not a token."""
    for position, chunk in enumerate(request.prompt.chunks):
        if chunk.type != "encoded_text":
            raise Refusal(
                400, f"prompt.chunks[{position}]: {chunk.type!r} is not served; Motet takes token ids (encoded_text)"
            )
        if any(
            value is not None for value in (chunk.data, chunk.format, chunk.location, chunk.expected_tokens, chunk.dmel)
        ):
            raise Refusal(
                400, f"prompt.chunks[{position}]: has more than tokens; a chunk of encoded_text has those alone"
            )
    tokens = [token for chunk in request.prompt.chunks for token in chunk.tokens]
    if not tokens:
        raise Refusal(400, "prompt: is empty; give at least one token id")
    return tokens


def check_request(request: SampleRequest) -> None:
    """Raise Refusal for what Motet does not serve, and for what contradicts itself."""
    for name, is_given in (
        ("base_model", request.base_model is not None),
        ("model_path", request.model_path is not None),
    ):
        if is_given:
            raise Refusal(400, f"{name}: is not read here; create a sampling session with it and give its id")
    for name, is_given in (
        ("target_prompt_logprobs", request.target_prompt_logprobs is not None),
        ("prompt_alt_tokens_k", request.prompt_alt_tokens_k != 0),
        ("record_stability_info", bool(request.record_stability_info)),
    ):
        if is_given:
            raise Refusal(400, f"{name}: is not served; leave it out")
    last_n, num_tokens = request.prompt_logprobs_last_n, len(prompt_of(request))
    if last_n is not None and not (request.prompt_logprobs and 1 <= last_n <= num_tokens - 1):
        raise Refusal(
            400,
            f"prompt_logprobs_last_n: is {last_n}; it needs prompt_logprobs, and is from 1 to {num_tokens - 1}, the "
            "length of the prompt less one",
        )
    for name, count in (
        ("topk_prompt_logprobs", request.topk_prompt_logprobs),
        ("topk_sample_logprobs", request.topk_sample_logprobs),
    ):
        if count < 0:
            raise Refusal(400, f"{name}: is {count}; it is at least 0")
    if not 1 <= request.num_samples <= MAX_NUM_SAMPLES:
        raise Refusal(400, f"num_samples: is {request.num_samples}; give 1 to {MAX_NUM_SAMPLES}")
    if request.seq_id is not None and not 0 <= request.seq_id < 10**18:
        raise Refusal(400, f"seq_id: {request.seq_id} is not from 0 to 10**18 - 1")
    stop = request.sampling_params.stop
    if isinstance(stop, list) and len({type(item) for item in stop}) > 1:
        raise Refusal(400, "sampling_params.stop: has texts and token ids; give a list of one kind")


async def sample(request: SampleRequest, source: Source, client: AsyncClient, timeout_s: float) -> bytes:
    """The response, a SampleResponse in protobuf. Raises MotetError."""
    prompt, params = prompt_of(request), request.sampling_params
    max_tokens = params.max_tokens
    if max_tokens is None:
        max_tokens = max(1, (await client.status()).model.max_model_len - len(prompt))
    options = _options(params, source) | GenerateOptions(
        max_tokens=max_tokens, n=request.num_samples, logprobs=request.topk_sample_logprobs
    )
    wants_prompt = bool(request.prompt_logprobs) or request.topk_prompt_logprobs > 0
    if not wants_prompt:
        options["logprobs_mode"] = "processed"
        generation, scored = await _generate(client, prompt, options, timeout_s), None
    elif _draws_from_the_models_own(params):  # processed and raw are the same
        options["prompt_logprobs"] = request.topk_prompt_logprobs
        generation = scored = await _generate(client, prompt, options, timeout_s)
    else:
        options["logprobs_mode"] = "processed"
        scoring = GenerateOptions(
            adapter=source.adapter,
            adapter_digest=source.digest,
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=request.topk_prompt_logprobs,
        )
        tasks = [asyncio.ensure_future(_generate(client, prompt, each, timeout_s)) for each in (options, scoring)]
        try:
            generation, scored = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # one that failed leaves the other to run
                task.cancel()
    return sample_response(
        generation,
        num_top=request.topk_sample_logprobs,
        prompt=None if scored is None else scored.started.prompt_logprobs,
        num_prompt_top=request.topk_prompt_logprobs,
        last_n=request.prompt_logprobs_last_n,
        with_prompt_logprobs=bool(request.prompt_logprobs),
    )


def _options(params: SamplingParams, source: Source) -> GenerateOptions:
    options = GenerateOptions(
        adapter=source.adapter,
        adapter_digest=source.digest,
        temperature=params.temperature,
        top_p=params.top_p,
        # Without one the server would draw one for each attempt, and a repeated attempt could differ.
        seed=secrets.randbits(63) if params.seed is None else params.seed,
    )
    if params.top_k != -1:
        options["top_k"] = params.top_k
    if params.stop == []:
        options["ignore_eos"] = True
    elif isinstance(params.stop, str):
        options["stop"] = params.stop
    elif params.stop:
        texts = [item for item in params.stop if isinstance(item, str)]
        options["stop"] = texts
        options["stop_token_ids"] = [item for item in params.stop if isinstance(item, int)]
    return options


def _draws_from_the_models_own(params: SamplingParams) -> bool:
    """Whether tokens are drawn from the distribution that the model gives. A greedy token is reported as if it were."""
    return params.temperature in (0, 1) and params.top_k == -1 and params.top_p == 1


async def _generate(client: AsyncClient, prompt: list[int], options: GenerateOptions, timeout_s: float) -> Generation:
    async with client.generate(prompt, timeout_s=timeout_s, **options) as stream:
        return await stream.result()
