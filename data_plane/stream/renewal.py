"""Says when a worker should leave its session and attach anew, because its files of TLS have changed.

Otherwise the session would end in the middle of work when the old certificate expires.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from motet.tls import TlsError, TlsFiles

LATE_SHARE = 0.1  # of the time that the certificate had left when the session began


class CertificateRenewal:
    """Looks at the TLS files of one session. Make it before the session's channel."""

    def __init__(self, files: TlsFiles, *, wall_clock: Callable[[], float] = time.time) -> None:
        """Raises TlsError."""
        self._files = files
        self._wall_clock = wall_clock
        self._stamp = files.stamp()
        now_s, end_s = wall_clock(), files.not_after_s()
        self._late_s = None if end_s is None else end_s - LATE_SHARE * (end_s - now_s)

    def reason(self, *, is_idle: bool) -> str | None:
        """Why the session should end now; None: it should not. Call it often.

        With new files that are complete, a session ends when the worker is idle, or when the old certificate expires
        soon.
        """
        is_late = self._late_s is not None and self._wall_clock() >= self._late_s
        if not (is_idle or is_late) or self._files.stamp() == self._stamp:
            return None
        try:
            self._files.credentials()
        except TlsError:  # half-written perhaps
            return None
        return "its certificate or authority was replaced"
