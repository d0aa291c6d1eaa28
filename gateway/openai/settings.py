"""Settings of the OpenAI-compatible API."""

from __future__ import annotations

from dataclasses import dataclass

from contract.settings import flags
from contract.settings.flags import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiSettings:
    """What an operator sets about the OpenAI-compatible API."""

    max_prompts: int = setting("prompts of one completions request", 128, unit="a count", lowest=1)
    sse_commit_after_s: float = setting(
        "a stream begins after this time at the latest; until then an error is an HTTP status",
        20.0,
        unit="seconds",
        lowest=0,
    )
    sse_keep_alive_s: float = setting(
        "a silent stream gets a comment after this time, for proxies", 15.0, unit="seconds", lowest=1
    )

    def __post_init__(self) -> None:
        if (mistake := flags.find_mistake(self)) is not None:
            raise ValueError(mistake)
