"""Client of Motet: one base model, many LoRA adapters, one batch, streamed over gRPC.

`Client` blocks, `AsyncClient` is for asyncio; both offer generate(), embed(), classify(), adapters and status().
`LLM` runs lists of prompts on a server of its own.

Names are imported when first used: the server imports `motet.v1` and `motet.command_line` and must not pay for, or
need what, the client needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from motet.adapters.asynchronous import AsyncAdapters as AsyncAdapters
    from motet.adapters.blocking import Adapters as Adapters
    from motet.aio import AsyncClient as AsyncClient
    from motet.client import Client as Client
    from motet.errors import (
        Aborted as Aborted,
        AlreadyExists as AlreadyExists,
        Cancelled as Cancelled,
        DataLoss as DataLoss,
        DeadlineExceeded as DeadlineExceeded,
        FailedPrecondition as FailedPrecondition,
        FieldViolation as FieldViolation,
        InvalidArgument as InvalidArgument,
        MotetError as MotetError,
        NotFound as NotFound,
        OutOfRange as OutOfRange,
        PermissionDenied as PermissionDenied,
        ResourceExhausted as ResourceExhausted,
        ServerError as ServerError,
        Unauthenticated as Unauthenticated,
        Unavailable as Unavailable,
        Unimplemented as Unimplemented,
    )
    from motet.generation.asynchronous import AsyncGenerationStream as AsyncGenerationStream
    from motet.generation.blocking import GenerationStream as GenerationStream
    from motet.inputs.constraints import (
        Choices as Choices,
        JsonObject as JsonObject,
        JsonSchema as JsonSchema,
        Lark as Lark,
        Regex as Regex,
        StructuralTag as StructuralTag,
        StructuralTags as StructuralTags,
    )
    from motet.inputs.conversations import (
        ChatMessage as ChatMessage,
        ToolCall as ToolCall,
    )
    from motet.inputs.lora_task import (
        LoraTask as LoraTask,
    )
    from motet.model.asynchronous import (
        AsyncModel as AsyncModel,
    )
    from motet.model.blocking import (
        Model as Model,
    )
    from motet.model.calls import (
        ModelFacts as ModelFacts,
        Tokenized as Tokenized,
        TokenizeOptions as TokenizeOptions,
    )
    from motet.offline.inputs import (
        SamplingParams as SamplingParams,
        TextPrompt as TextPrompt,
        TokensPrompt as TokensPrompt,
    )
    from motet.offline.llm import (
        LLM as LLM,
    )
    from motet.offline.results import (
        ClassificationOutput as ClassificationOutput,
        EmbeddingOutput as EmbeddingOutput,
        PoolingRequestOutput as PoolingRequestOutput,
        RequestOutput as RequestOutput,
    )
    from motet.pooling.calls import (
        Classification as Classification,
        Classifications as Classifications,
        Embedding as Embedding,
        Embeddings as Embeddings,
        Pooling as Pooling,
        PoolingOptions as PoolingOptions,
        ProblemType as ProblemType,
    )
    from motet.requests import (
        GenerateOptions as GenerateOptions,
    )
    from motet.retries import (
        RetryPolicy as RetryPolicy,
    )
    from motet.types import (
        Adapter as Adapter,
        AdapterCanary as AdapterCanary,
        AdapterEvent as AdapterEvent,
        AdapterEventKind as AdapterEventKind,
        AdapterPlacement as AdapterPlacement,
        AdapterState as AdapterState,
        AdapterTier as AdapterTier,
        AdapterUse as AdapterUse,
        AdapterVersion as AdapterVersion,
        AdapterVisibility as AdapterVisibility,
        BeamSearch as BeamSearch,
        Chunk as Chunk,
        Completion as Completion,
        Finished as Finished,
        FinishReason as FinishReason,
        Generation as Generation,
        PushedVersion as PushedVersion,
        Registration as Registration,
        RegistrationChange as RegistrationChange,
        Residency as Residency,
        ResidencyOutcome as ResidencyOutcome,
        ServerStatus as ServerStatus,
        SignatureMethod as SignatureMethod,
        Started as Started,
        Timings as Timings,
        TokenLogprob as TokenLogprob,
        TokenLogprobs as TokenLogprobs,
        Usage as Usage,
        VersionRollout as VersionRollout,
        VersionSignature as VersionSignature,
        VersionVerification as VersionVerification,
    )
    from motet.workers.asynchronous import (
        AsyncWorkers as AsyncWorkers,
    )
    from motet.workers.blocking import (
        Workers as Workers,
    )

__version__ = "0.1.0"

_NAMES_BY_MODULE = {
    "motet.adapters.asynchronous": "AsyncAdapters",
    "motet.adapters.blocking": "Adapters",
    "motet.aio": "AsyncClient",
    "motet.client": "Client",
    "motet.errors": (
        "Aborted AlreadyExists Cancelled DataLoss DeadlineExceeded FailedPrecondition FieldViolation "
        "InvalidArgument MotetError NotFound OutOfRange PermissionDenied ResourceExhausted ServerError "
        "Unauthenticated Unavailable Unimplemented"
    ),
    "motet.generation.asynchronous": "AsyncGenerationStream",
    "motet.generation.blocking": "GenerationStream",
    "motet.inputs.constraints": "Choices JsonObject JsonSchema Lark Regex StructuralTag StructuralTags",
    "motet.inputs.conversations": "ChatMessage ToolCall",
    "motet.inputs.lora_task": "LoraTask",
    "motet.model.asynchronous": "AsyncModel",
    "motet.model.blocking": "Model",
    "motet.model.calls": "ModelFacts TokenizeOptions Tokenized",
    "motet.offline.inputs": "SamplingParams TextPrompt TokensPrompt",
    "motet.offline.llm": "LLM",
    "motet.offline.results": "ClassificationOutput EmbeddingOutput PoolingRequestOutput RequestOutput",
    "motet.pooling.calls": "Classification Classifications Embedding Embeddings Pooling PoolingOptions ProblemType",
    "motet.requests": "GenerateOptions",
    "motet.retries": "RetryPolicy",
    "motet.types": (
        "Adapter AdapterCanary AdapterEvent AdapterEventKind AdapterPlacement AdapterState AdapterTier "
        "AdapterUse AdapterVersion AdapterVisibility BeamSearch Chunk Completion FinishReason Finished "
        "Generation PushedVersion Registration RegistrationChange Residency ResidencyOutcome ServerStatus "
        "SignatureMethod Started Timings TokenLogprob TokenLogprobs Usage VersionRollout VersionSignature "
        "VersionVerification"
    ),
    "motet.workers.asynchronous": "AsyncWorkers",
    "motet.workers.blocking": "Workers",
}
_MODULE_BY_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}


if not TYPE_CHECKING:  # a type checker would take any name for granted

    def __getattr__(name: str) -> object:
        if name not in _MODULE_BY_NAME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_BY_NAME])
