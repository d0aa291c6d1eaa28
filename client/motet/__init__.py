"""Client of Motet: one base model, many LoRA adapters, one batch, streamed over gRPC.

`Client` blocks, `AsyncClient` is for asyncio; both offer generate(), adapters and status().
"""

from motet.aio import AsyncAdapters, AsyncClient, AsyncGenerationStream
from motet.channel import RetryPolicy
from motet.client import Adapters, Client, GenerationStream
from motet.errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    FieldViolation,
    InvalidArgument,
    MotetError,
    NotFound,
    OutOfRange,
    PermissionDenied,
    ResourceExhausted,
    ServerError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from motet.requests import GenerateOptions
from motet.types import (
    Adapter,
    AdapterPlacement,
    AdapterState,
    AdapterTier,
    AdapterVersion,
    ChatMessage,
    Chunk,
    Finished,
    FinishReason,
    Generation,
    ServerStatus,
    Started,
    Timings,
    Usage,
)

__version__ = "0.1.0"

__all__ = [
    "Aborted",
    "Adapter",
    "AdapterPlacement",
    "AdapterState",
    "AdapterTier",
    "AdapterVersion",
    "Adapters",
    "AlreadyExists",
    "AsyncAdapters",
    "AsyncClient",
    "AsyncGenerationStream",
    "Cancelled",
    "ChatMessage",
    "Chunk",
    "Client",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "FieldViolation",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "Generation",
    "GenerationStream",
    "InvalidArgument",
    "MotetError",
    "NotFound",
    "OutOfRange",
    "PermissionDenied",
    "ResourceExhausted",
    "RetryPolicy",
    "ServerError",
    "ServerStatus",
    "Started",
    "Timings",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Usage",
]
