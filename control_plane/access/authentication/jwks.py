"""The public keys that verify tokens: read from a JSON Web Key Set, in a file or at a URL.

Needs joserfc and cryptography; nothing imports this module before tokens are configured.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from joserfc.errors import JoseError
from joserfc.jwk import JWKRegistry, Key
from joserfc.util import urlsafe_b64decode

from contract.process_log import printable, shown
from control_plane.access.authentication.fetching import fetch_url
from control_plane.access.authentication.grants import InvalidAccessFile, read_object, shortened
from control_plane.access.watched_files import WatchedFiles
from control_plane.daemon_threads import DaemonThreads
from control_plane.waits import is_set_within

logger = logging.getLogger(__name__)

MIN_RSA_BITS = 2048
MAX_RSA_BITS = 8192  # a verification with larger ones takes milliseconds
MAX_KEYS = 100
REFRESH_S = 300.0  # between two fetches
RETRY_S = 15.0  # after a fetch that failed
MIN_INTERVAL_S = 30.0  # between two fetches that unknown keys of tokens cause

# What is read of a key, by its type; everything else in it is ignored.
_MATERIAL = {"RSA": ("n", "e"), "EC": ("crv", "x", "y"), "OKP": ("crv", "x")}
_ALGORITHM: dict[tuple[Any, Any], str] = {("RSA", None): "RS256", ("EC", "P-256"): "ES256", ("OKP", "Ed25519"): "EdDSA"}


@dataclass(frozen=True, slots=True)
class SigningKeys:
    """Public keys by name and algorithm. A key serves one algorithm only."""

    by_name: Mapping[tuple[str | None, str], Key]

    def find(self, kid: str | None, algorithm: str) -> Key | None:
        """The key that a token's header means; a token that names none means the only key of its algorithm."""
        if kid is not None:
            return self.by_name.get((kid, algorithm))
        fitting = [key for (_, its), key in self.by_name.items() if its == algorithm]
        return fitting[0] if len(fitting) == 1 else None


class KeySource(Protocol):
    """Where the keys come from."""

    @property
    def value(self) -> SigningKeys | None:
        """The keys at present: the same object until they change. None if none were fetched yet."""

    def wants_other_keys(self) -> bool:
        """A token names a key that is not here. Whether keys are being fetched, so that trying again may help."""


class JwksFile:
    """Keys in a file, read again when it changes."""

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises OSError or ValueError."""
        self.files = WatchedFiles([path], parse_jwks, what="token keys")
        _require_any(self.files.value)
        self.files.on_change(_warn_of_none)

    @property
    def value(self) -> SigningKeys:
        return self.files.value

    def wants_other_keys(self) -> bool:
        return False


class JwksUrl:
    """Keys at a URL, fetched again and again in the background. The latest ones stay while that fails."""

    def __init__(
        self,
        url: str,
        fetch: Callable[[str], bytes] | None = None,
        *,
        refresh_s: float = REFRESH_S,
        retry_s: float = RETRY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._fetch = fetch or fetch_url
        self._refresh_s = refresh_s
        self._retry_s = retry_s
        self._clock = clock
        self._thread = DaemonThreads(1, name="token keys")  # a fetch that hangs does not keep the process from ending
        self._content = b""
        self._value: SigningKeys | None = None
        self._failure = ""  # why the latest fetch failed; empty: it did not
        self._fetched_s = clock()
        self._wanted = asyncio.Event()  # a fetch is due, or runs
        self._task: asyncio.Task[None] | None = None

    @property
    def value(self) -> SigningKeys | None:
        return self._value

    def wants_other_keys(self) -> bool:
        if not self._wanted.is_set() and self._clock() - self._fetched_s >= MIN_INTERVAL_S:
            self._wanted.set()
        return self._wanted.is_set()

    async def open(self) -> None:
        """Fetch the keys, and go on in the background. Raises ValueError if the URL gives no usable keys.

        If nothing responds there, the start goes on without keys: other methods of authentication still work.
        """
        await self._refresh(is_first=True)
        self._task = asyncio.create_task(self._run(), name="token keys")

    async def close(self) -> None:
        """Fetch nothing any more."""
        self._thread.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            pause_s = self._retry_s if self._failure else self._refresh_s
            await is_set_within(self._wanted, pause_s)
            self._wanted.set()
            try:
                await self._refresh(is_first=False)
            except Exception:  # the loop's edge
                logger.exception("token keys not fetched, the former ones stay")
            self._wanted.clear()

    async def _refresh(self, *, is_first: bool) -> None:
        self._fetched_s = self._clock()
        try:
            content = await self._thread.run(self._fetch, self._url)
            if content != self._content:
                left_out: list[str] = []
                keys = parse_jwks(content, left_out.append)
                _warn_of_left_out(left_out)
                (_require_any if is_first else _warn_of_none)(keys)
                self._value, self._content = keys, content
        except (OSError, ValueError) as error:
            if is_first and isinstance(error, ValueError):
                raise
            self._note_failure(printable(str(error), 300))
            return
        if self._failure:
            logger.info("token keys fetched again", extra=shown("keys of tokens: fetched again"))
        self._failure = ""

    def _note_failure(self, reason: str) -> None:
        if reason != self._failure:
            logger.warning(
                "token keys not fetched, the former ones stay num_keys=%d error=%s",
                len(self._value.by_name) if self._value else 0,
                reason,
                extra=shown(f"keys of tokens: not fetched, those from before stay: {reason}"),
            )
        self._failure = reason


def parse_jwks(content: bytes, leave_out: Callable[[str], None] | None = None) -> SigningKeys:
    """The keys of a set that tokens may be signed with; keys of other kinds are left out. Raises InvalidAccessFile.

    There may be none: an issuer that removes its last key means that nothing counts that the key signed. A key that is
    weak, private or damaged makes the set invalid. With `leave_out`, which gets the reason, only this key is left out
    (RFC 7517, section 5): the operator cannot correct an issuer's set, and the keys that the issuer removed from it
    must not stay.
    """
    entries = read_object(content).get("keys")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidAccessFile("keys: is not a list of objects; give a JSON Web Key Set (RFC 7517)")
    if len(entries) > MAX_KEYS:
        raise InvalidAccessFile(f"keys: has {len(entries)} entries; at most {MAX_KEYS} are allowed")
    keys: dict[tuple[str | None, str], Key] = {}
    for index, entry in enumerate(entries):
        try:
            _add_key(keys, entry, f"keys[{index}]")
        except InvalidAccessFile as error:
            if leave_out is None:
                raise
            leave_out(str(error))
    return SigningKeys(keys)


def _add_key(keys: dict[tuple[str | None, str], Key], entry: Mapping[str, Any], where: str) -> None:
    """Add the key unless it is of another kind. Raises InvalidAccessFile, and adds nothing, if it cannot be used."""
    algorithm = _algorithm_of(entry, where)
    if algorithm is None:
        return
    kid = entry.get("kid")
    if kid is not None and not isinstance(kid, str):
        raise InvalidAccessFile(f"{where}.kid: {shortened(kid)} is not a string")
    if (kid, algorithm) in keys:
        raise InvalidAccessFile(f"{where}.kid: {shortened(kid)} names two keys for {algorithm}; remove one")
    keys[kid, algorithm] = _import_key(entry, where)


def _require_any(keys: SigningKeys) -> None:
    """Raises InvalidAccessFile. A start without a key is a wrong file or URL."""
    if not keys.by_name:
        raise InvalidAccessFile("keys: has none for RS256, ES256 or EdDSA; tokens are verified by these alone")


def _warn_of_left_out(reasons: list[str]) -> None:
    if reasons:
        logger.warning(
            "token keys left out num_left_out=%d error=%s",
            len(reasons),
            printable("; ".join(reasons), 300),
            extra=shown(f"keys of tokens: {len(reasons)} cannot be used, tokens that they signed are refused"),
        )


def _warn_of_none(keys: SigningKeys) -> None:
    if not keys.by_name:
        logger.warning(
            "token keys removed, every token is refused",
            extra=shown("keys of tokens: there is none for RS256, ES256 or EdDSA any more; every token is refused"),
        )


def _algorithm_of(entry: Mapping[str, Any], where: str) -> str | None:
    """The algorithm that a key verifies; None for keys of other algorithms, or not for signatures."""
    kty, curve = entry.get("kty"), None if entry.get("kty") == "RSA" else entry.get("crv")
    is_text = isinstance(kty, str) and (curve is None or isinstance(curve, str))
    algorithm = _ALGORITHM.get((kty, curve)) if is_text else None
    operations = entry.get("key_ops", ["verify"])
    is_for_signatures = entry.get("use", "sig") == "sig" and isinstance(operations, list) and "verify" in operations
    if algorithm is None or not is_for_signatures or entry.get("alg", algorithm) not in _names_of(algorithm):
        return None
    if "d" in entry:
        raise InvalidAccessFile(f"{where}: is a private key; give the public one, and replace the key that was copied")
    return algorithm


def _names_of(algorithm: str) -> tuple[str, ...]:
    """RFC 9864 calls EdDSA with this curve Ed25519."""
    return (algorithm, "Ed25519") if algorithm == "EdDSA" else (algorithm,)


def _import_key(entry: Mapping[str, Any], where: str) -> Key:
    kty = entry["kty"]
    material = {name: entry[name] for name in _MATERIAL[kty] if isinstance(entry.get(name), str)}
    if len(material) < len(_MATERIAL[kty]):
        raise InvalidAccessFile(f"{where}: needs the members {', '.join(_MATERIAL[kty])} of a key of type {kty}")
    try:
        if kty == "RSA":
            _check_size(urlsafe_b64decode(entry["n"].encode()), where)
        return JWKRegistry.import_key({"kty": kty, **material})
    except InvalidAccessFile:
        raise
    except (JoseError, ValueError, TypeError) as error:
        raise InvalidAccessFile(f"{where}: is not a valid key of type {kty}: {printable(str(error), 100)}") from error


def _check_size(modulus: bytes, where: str) -> None:
    num_bits = int.from_bytes(modulus, "big").bit_length()
    if not MIN_RSA_BITS <= num_bits <= MAX_RSA_BITS:
        raise InvalidAccessFile(f"{where}: has {num_bits} bits; RSA keys of {MIN_RSA_BITS} to {MAX_RSA_BITS} are used")
