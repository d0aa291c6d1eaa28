"""One request that ended, as the observers of requests receive it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from contract.v1.sampling import SamplingValues
from control_plane.caller import THE_SERVER, Caller


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """How a generation was to choose its tokens and to end, with every value in effect."""

    sampling: SamplingValues
    max_tokens: int  # of each completion
    num_completions: int  # that the client gets
    stop: Sequence[str] = ()  # strings that end a completion; the client's text


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """One request that ended, whether or not it got what it wanted."""

    tenant: str
    adapters: Sequence[str]  # ids; none for the base model
    reasons: Sequence[str]  # how each completion ended, or the reason of the error
    num_prompt_tokens: int
    num_cached_tokens: int  # of these, found in the prefix cache
    num_generated_tokens: int
    queue_s: float | None  # None: never ran
    first_token_s: float | None  # from the arrival; None: no token came, or it has none
    total_s: float
    adapter_wait_s: float | None = None  # of queue_s, until its adapter was loaded; None: no adapter, or never ran
    error: str = ""  # reason of the error; empty: it ended in order
    request_id: str = ""  # as the client knows it
    action: str = ""  # as the audit log calls it
    digests: Sequence[str] = ()  # of the versions, as `adapters`
    workers: Sequence[str] = ()  # ids of those that computed it, in order
    caller: Caller = THE_SERVER
    settings: RequestSettings | None = None  # None: it generates no tokens


class Observer(Protocol):
    """Learns of requests."""

    @property
    def is_on(self) -> bool:
        """Whether anybody looks."""

    def ended(self, request: EndedRequest) -> None:
        """A request that was accepted has ended. Called in its task, just after the end."""

    def refused(self, reason: str) -> None:
        """A call ended with an error."""


class Observers:
    """Several, one after the other. None: nobody looks."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = [observer for observer in observers if observer.is_on]

    @property
    def is_on(self) -> bool:
        return bool(self._observers)

    def ended(self, request: EndedRequest) -> None:
        """See Observer."""
        for observer in self._observers:
            observer.ended(request)

    def refused(self, reason: str) -> None:
        """See Observer."""
        for observer in self._observers:
            observer.refused(reason)
