"""Verifies the signature of an adapter's files when they are registered.

Reads files and blocks: call it in a thread. Knows nothing of registrations.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from control_plane.access.settings import AccessSettings
from control_plane.access.watched_files import FileWatcher, WatchedFiles
from control_plane.errors import SignatureInvalid
from control_plane.signatures.bundle import MAX_SIGNATURE_BYTES, check_files, read_bundle, read_statement
from control_plane.signatures.signers import Signers, read_signers
from control_plane.signatures.verdict import SignatureVerdict

SIGNATURE_FILE = "model.sig"
_COPY_BYTES = 1 << 20  # in memory at a time


def open_verifier(settings: AccessSettings, watcher: FileWatcher) -> SignatureVerifier:
    """What the operator has set up; `watcher` reads the file of signers again. Raises ValueError, flag first."""
    if settings.trusted_signers is None:
        return SignatureVerifier()
    try:
        signers = WatchedFiles([settings.trusted_signers], read_signers, what="trusted signers")
    except (OSError, ValueError) as error:
        raise ValueError(f"--trusted-signers: {settings.trusted_signers}: {error}") from error
    except ModuleNotFoundError as error:
        raise ValueError(f"--trusted-signers: needs the Python package {error.name}; install it") from error
    watcher.add(signers)
    return SignatureVerifier(signers, is_required=settings.require_signature)


class SignatureVerifier:
    """Judges files by the signers that the operator trusts. Without any, signatures are not looked at."""

    def __init__(
        self,
        signers: WatchedFiles[Signers] | None = None,
        *,
        is_required: bool = False,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`is_required`: files without a signature are refused."""
        assert signers is not None or not is_required, "a signature that nobody can verify is not required"
        self._signers = signers
        self._is_required = is_required
        self._wall_clock = wall_clock

    def verify(
        self, tenant: str, files: Mapping[str, Path], copy_to: Path | None = None, demanded: Collection[str] = ()
    ) -> tuple[dict[str, Path], SignatureVerdict | None]:
        """The files to register, without the signature, and whose signature they have; None: they have none.

        `copy_to`: the files may be changed by somebody else meanwhile; those that are returned lie in this directory
        and are what was verified. `demanded`: files that must be there if they were signed. Raises SignatureInvalid,
        and OSError where a file cannot be read.
        """
        signed = {name: path for name, path in files.items() if name != SIGNATURE_FILE}
        if self._signers is None:
            return signed, None
        if SIGNATURE_FILE not in files:
            if self._is_required:
                raise SignatureInvalid(
                    f"the adapter has no {SIGNATURE_FILE}, and this server registers signed adapters only; sign its "
                    "directory with `model_signing sign key` (docs/security.md)"
                )
            return signed, None
        with files[SIGNATURE_FILE].open("rb") as file:
            bundle = read_bundle(file.read(MAX_SIGNATURE_BYTES + 1))
        verdict = self._signers.value.identify(bundle, tenant, self._wall_clock())
        listed = read_statement(bundle.payload)
        found = {}
        for name, path in signed.items():
            copy = copy_to / name if copy_to is not None else None
            found[name] = _sha256(path, copy)
            signed[name] = path if copy is None else copy
        check_files(listed, found, demanded)
        return signed, verdict


def _sha256(path: Path, copy: Path | None) -> str:
    """The hash of the file's bytes, which are copied on the way if a copy is wanted."""
    digest = hashlib.sha256()
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(path.open("rb"))
        out = opened.enter_context(copy.open("xb")) if copy is not None else None
        while data := file.read(_COPY_BYTES):
            digest.update(data)
            if out is not None:
                out.write(data)
    return digest.hexdigest()
