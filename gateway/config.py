"""Settings of the gateway as a whole: those of HTTP and those of each protocol. Flags and --help follow from them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from contract.settings import config_file, flags
from contract.settings.flags import group
from gateway.http.settings import HttpSettings
from gateway.openai.settings import OpenAiSettings
from gateway.registry.settings import RegistrySettings
from gateway.tinker.settings import TinkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Everything that an operator sets about the gateway."""

    http: HttpSettings = group(HttpSettings)
    openai: OpenAiSettings = group(OpenAiSettings)
    tinker: TinkerSettings = group(TinkerSettings)
    registry: RegistrySettings = group(RegistrySettings)


def environment(argv: Sequence[str]) -> Mapping[str, str]:
    """The process's environment, over what the file of --config says. Raises ConfigFileError."""
    return config_file.environment(argv, config_file.GATEWAY, GatewayConfig)


def add_arguments(parser: argparse.ArgumentParser, environ: Mapping[str, str] = os.environ) -> None:
    """Add every flag of the gateway. MOTET_<FLAG> in `environ` is a flag's default. Raises ValueError."""
    config_file.add_argument(parser, environ)
    flags.add_arguments(parser, GatewayConfig, environ)


def from_args(namespace: argparse.Namespace) -> GatewayConfig:
    """The checked configuration. Raises ValueError naming the flag, the value and the limit."""
    config: GatewayConfig = flags.from_args(namespace, GatewayConfig)
    return config
