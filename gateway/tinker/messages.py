"""Bodies of the Tinker protocol's requests, as the SDK 0.38 sends them. A field that is not here is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A body, strictly."""


class Chunk(Message):
    """A part of a prompt. Only `encoded_text` is served; other fields are known in order to refuse the type."""

    type: str = "encoded_text"
    tokens: list[int] = []
    data: Any = None
    format: Any = None
    location: Any = None
    expected_tokens: Any = None
    dmel: Any = None


class Prompt(Message):
    """What is continued: token ids in chunks."""

    chunks: list[Chunk]


class SamplingParams(Message):
    """How tokens are chosen. The defaults are the SDK's."""

    max_tokens: int | None = None
    seed: int | None = None
    # None: the model's end-of-sequence tokens end a sample. []: nothing does but max_tokens.
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1  # -1: all
    top_p: float = 1.0


class SampleRequest(Message):
    """`asample`."""

    prompt: Prompt
    sampling_params: SamplingParams
    sampling_session_id: str | None = None
    seq_id: int | None = None
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    # Refused by name.
    base_model: str | None = None
    model_path: str | None = None
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None
    type: str = "sample"


class CreateSession(Message):
    """`create_session`. Nothing of it is kept: Motet has no projects and no tags."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    type: str = "create_session"


class CreateSamplingSession(Message):
    """`create_sampling_session`: one of the two names what is sampled from."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None
    type: str = "create_sampling_session"


class SessionHeartbeat(Message):
    """`session_heartbeat`."""

    session_id: str
    type: str = "session_heartbeat"


class RetrieveFuture(Message):
    """`retrieve_future`. `allow_metadata_only` is an offer that is not taken."""

    request_id: str
    allow_metadata_only: bool = False


class CancelFuture(Message):
    """`cancel_future`."""

    request_id: str
