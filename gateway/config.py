"""Settings of the gateway as a whole: those of HTTP and those of each protocol. Flags and --help follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from contract.flags import group
from gateway.http.settings import HttpSettings
from gateway.openai.settings import OpenAiSettings
from gateway.tinker.settings import TinkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Everything that an operator sets about the gateway."""

    http: HttpSettings = group(HttpSettings)
    openai: OpenAiSettings = group(OpenAiSettings)
    tinker: TinkerSettings = group(TinkerSettings)
