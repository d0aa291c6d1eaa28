"""Every error of a worker. They reach the control plane as SlotState or Fault, and the log."""

from __future__ import annotations


class WorkerError(Exception):
    """Base of a worker's errors."""


class ConfigError(WorkerError):
    """A setting or checkpoint that this worker cannot run with."""


class UnsupportedModel(ConfigError):
    """The checkpoint's architecture cannot be served."""


class SelfCheckFailed(ConfigError):
    """This worker computes wrongly: its checkpoint is damaged, or its device is broken."""


class PlanRefused(WorkerError):
    """A plan that contradicts this worker's state."""


class StaleSlot(PlanRefused):
    """A slot generation that is not the one in the slot."""


class AdapterLoadError(WorkerError):
    """An adapter could not be put into its slot. `is_retryable`: another try may help."""

    is_retryable = False


class ArenaFull(AdapterLoadError):
    """The adapter does not fit the free part of the arena."""

    is_retryable = True


class AdapterUnavailable(AdapterLoadError):
    """No tier could give the adapter's bytes."""

    is_retryable = True


class AdapterLost(AdapterLoadError):
    """The adapter's bytes are missing or damaged in the artifact store: another try does not help."""


class AdapterCorrupt(AdapterLoadError):
    """The bytes that arrived are not the requested adapter's."""

    is_retryable = True


class AdapterMismatch(AdapterLoadError):
    """The adapter names modules or shapes that this model does not have."""
