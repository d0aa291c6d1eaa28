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
    from motet.aio import (
        AsyncClient as AsyncClient,
    )
    from motet.aio import (
        AsyncGenerationStream as AsyncGenerationStream,
    )
    from motet.client import (
        Client as Client,
    )
    from motet.client import (
        GenerationStream as GenerationStream,
    )
    from motet.errors import (
        Aborted as Aborted,
    )
    from motet.errors import (
        AlreadyExists as AlreadyExists,
    )
    from motet.errors import (
        Cancelled as Cancelled,
    )
    from motet.errors import (
        DataLoss as DataLoss,
    )
    from motet.errors import (
        DeadlineExceeded as DeadlineExceeded,
    )
    from motet.errors import (
        FailedPrecondition as FailedPrecondition,
    )
    from motet.errors import (
        FieldViolation as FieldViolation,
    )
    from motet.errors import (
        InvalidArgument as InvalidArgument,
    )
    from motet.errors import (
        MotetError as MotetError,
    )
    from motet.errors import (
        NotFound as NotFound,
    )
    from motet.errors import (
        OutOfRange as OutOfRange,
    )
    from motet.errors import (
        PermissionDenied as PermissionDenied,
    )
    from motet.errors import (
        ResourceExhausted as ResourceExhausted,
    )
    from motet.errors import (
        ServerError as ServerError,
    )
    from motet.errors import (
        Unauthenticated as Unauthenticated,
    )
    from motet.errors import (
        Unavailable as Unavailable,
    )
    from motet.errors import (
        Unimplemented as Unimplemented,
    )
    from motet.inputs.constraints import (
        Choices as Choices,
    )
    from motet.inputs.constraints import (
        JsonObject as JsonObject,
    )
    from motet.inputs.constraints import (
        JsonSchema as JsonSchema,
    )
    from motet.inputs.constraints import (
        Lark as Lark,
    )
    from motet.inputs.constraints import (
        Regex as Regex,
    )
    from motet.inputs.constraints import (
        StructuralTag as StructuralTag,
    )
    from motet.inputs.constraints import (
        StructuralTags as StructuralTags,
    )
    from motet.inputs.conversations import (
        ChatMessage as ChatMessage,
    )
    from motet.inputs.conversations import (
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
    )
    from motet.model.calls import (
        Tokenized as Tokenized,
    )
    from motet.model.calls import (
        TokenizeOptions as TokenizeOptions,
    )
    from motet.offline.inputs import (
        SamplingParams as SamplingParams,
    )
    from motet.offline.inputs import (
        TextPrompt as TextPrompt,
    )
    from motet.offline.inputs import (
        TokensPrompt as TokensPrompt,
    )
    from motet.offline.llm import (
        LLM as LLM,
    )
    from motet.offline.results import (
        ClassificationOutput as ClassificationOutput,
    )
    from motet.offline.results import (
        EmbeddingOutput as EmbeddingOutput,
    )
    from motet.offline.results import (
        PoolingRequestOutput as PoolingRequestOutput,
    )
    from motet.offline.results import (
        RequestOutput as RequestOutput,
    )
    from motet.pooling.calls import (
        Classification as Classification,
    )
    from motet.pooling.calls import (
        Classifications as Classifications,
    )
    from motet.pooling.calls import (
        Embedding as Embedding,
    )
    from motet.pooling.calls import (
        Embeddings as Embeddings,
    )
    from motet.pooling.calls import (
        Pooling as Pooling,
    )
    from motet.pooling.calls import (
        PoolingOptions as PoolingOptions,
    )
    from motet.pooling.calls import (
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
    )
    from motet.types import (
        AdapterCanary as AdapterCanary,
    )
    from motet.types import (
        AdapterEvent as AdapterEvent,
    )
    from motet.types import (
        AdapterEventKind as AdapterEventKind,
    )
    from motet.types import (
        AdapterPlacement as AdapterPlacement,
    )
    from motet.types import (
        AdapterState as AdapterState,
    )
    from motet.types import (
        AdapterTier as AdapterTier,
    )
    from motet.types import (
        AdapterUse as AdapterUse,
    )
    from motet.types import (
        AdapterVersion as AdapterVersion,
    )
    from motet.types import (
        AdapterVisibility as AdapterVisibility,
    )
    from motet.types import (
        BeamSearch as BeamSearch,
    )
    from motet.types import (
        Chunk as Chunk,
    )
    from motet.types import (
        Completion as Completion,
    )
    from motet.types import (
        Finished as Finished,
    )
    from motet.types import (
        FinishReason as FinishReason,
    )
    from motet.types import (
        Generation as Generation,
    )
    from motet.types import (
        PushedVersion as PushedVersion,
    )
    from motet.types import (
        Registration as Registration,
    )
    from motet.types import (
        RegistrationChange as RegistrationChange,
    )
    from motet.types import (
        Residency as Residency,
    )
    from motet.types import (
        ResidencyOutcome as ResidencyOutcome,
    )
    from motet.types import (
        ServerStatus as ServerStatus,
    )
    from motet.types import (
        SignatureMethod as SignatureMethod,
    )
    from motet.types import (
        Started as Started,
    )
    from motet.types import (
        Timings as Timings,
    )
    from motet.types import (
        TokenLogprob as TokenLogprob,
    )
    from motet.types import (
        TokenLogprobs as TokenLogprobs,
    )
    from motet.types import (
        Usage as Usage,
    )
    from motet.types import (
        VersionRollout as VersionRollout,
    )
    from motet.types import (
        VersionSignature as VersionSignature,
    )
    from motet.types import (
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
    "motet.aio": "AsyncClient AsyncGenerationStream",
    "motet.client": "Client GenerationStream",
    "motet.errors": (
        "Aborted AlreadyExists Cancelled DataLoss DeadlineExceeded FailedPrecondition FieldViolation "
        "InvalidArgument MotetError NotFound OutOfRange PermissionDenied ResourceExhausted ServerError "
        "Unauthenticated Unavailable Unimplemented"
    ),
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
