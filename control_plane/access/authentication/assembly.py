"""Builds the Authenticator that the settings describe. The only place that knows all methods of authentication."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from contract.process_log import shown
from control_plane.access.authentication.api_keys import ApiKeys
from control_plane.access.authentication.certificates import ClientIdentities
from control_plane.access.authenticator import Authenticator, Method
from control_plane.access.settings import AccessSettings
from control_plane.access.watched_files import FileWatcher

logger = logging.getLogger(__name__)


async def open_authenticator(
    settings: AccessSettings, watcher: FileWatcher, stack: contextlib.AsyncExitStack
) -> Authenticator:
    """What the operator has set up for clients to prove who they are; `watcher` reads its files again.

    Bearer tokens come before certificates. Raises ValueError, whose text begins with the flag.
    """
    methods: list[Method] = []
    names: list[str] = []
    if settings.api_keys is not None:
        with _said_of("--api-keys"):
            keys = ApiKeys(settings.api_keys)
        watcher.add(keys.files)
        methods.append(keys)
        names.append(f"API keys ({keys.num_keys})")
    if settings.has_tokens:
        with _said_of("--jwt-jwks"):
            methods.append(await _open_tokens(settings, watcher, stack))
        names.append(f"tokens of {settings.jwt_issuer}")
    if settings.client_identities is not None:
        with _said_of("--client-identities"):
            identities = ClientIdentities(settings.client_identities)
        watcher.add(identities.files)
        methods.append(identities)
        names.append(f"client certificates ({identities.num_identities} names)")
    if methods:
        listed = ", ".join(names)
        logger.info("authentication on methods=%s", listed, extra=shown(f"clients need a credential: {listed}"))
    else:
        who = "reaches the ports" if settings.tls_client_ca is None else "has a certificate of --tls-client-ca"
        sentence = f"no authentication: whoever {who} may do everything (docs/security.md)"
        logger.info("authentication off", extra=shown(sentence))
    return Authenticator(methods)


async def _open_tokens(settings: AccessSettings, watcher: FileWatcher, stack: contextlib.AsyncExitStack) -> Method:
    assert settings.jwt_issuer is not None and settings.jwt_audience is not None and settings.jwt_jwks is not None
    jwks, jwt = _module("jwks"), _module("jwt")
    if settings.has_jwks_url:
        source = jwks.JwksUrl(settings.jwt_jwks)
        stack.push_async_callback(source.close)
        await source.open()
    else:
        source = jwks.JwksFile(Path(settings.jwt_jwks))
        watcher.add(source.files)
    rules = jwt.TokenRules(
        issuer=settings.jwt_issuer,
        audience=settings.jwt_audience,
        tenant_claim=settings.jwt_tenant_claim,
        roles_claim=settings.jwt_roles_claim,
    )
    method: Method = jwt.JsonWebTokens(rules, source)
    return method


def _module(name: str) -> ModuleType:
    """A module that needs packages which a server without tokens does without."""
    try:
        return importlib.import_module(f"control_plane.access.authentication.{name}")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"needs the Python package {error.name!r}, which is not installed; install the server's requirements"
        ) from error


@contextlib.contextmanager
def _said_of(flag: str) -> Iterator[None]:
    """Begin the text of an error with the flag whose file it is about."""
    try:
        yield
    except FileNotFoundError as error:
        raise ValueError(f"{flag}: {error.filename} is not there; make it, or leave the flag out") from error
    except OSError as error:
        raise ValueError(f"{flag}: {error.filename} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error
