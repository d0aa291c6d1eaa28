"""Settings of the Tinker protocol."""

from __future__ import annotations

from dataclasses import dataclass

from motet.command_line import byte_size

from contract.settings import flags
from contract.settings.flags import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerSettings:
    """What an operator sets about the Tinker protocol."""

    max_samples: int = setting(
        "sample requests that run or whose results are kept; above it only keys with less than an equal part start one",
        4096,
        unit="a count",
        lowest=1,
    )
    max_result_bytes: int = setting(
        "results that are kept; above it the oldest of the key with the most are dropped",
        256 << 20,
        unit="bytes",
        parse=byte_size,
        lowest=1 << 20,
        metavar="SIZE",
    )
    result_ttl_s: float = setting("a result is kept so long", 120.0, unit="seconds", lowest=1)
    abandoned_s: float = setting(
        "a sample request that its client no longer polls is cancelled after this time", 60.0, unit="seconds", lowest=1
    )

    def __post_init__(self) -> None:
        if (mistake := flags.find_mistake(self)) is not None:
            raise ValueError(mistake)
