"""ModelService: what the model and its tokenizer are, and texts to token ids and back, without a generation."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from motet.v1 import model_pb2, model_pb2_grpc, types_pb2

from contract.sampling import PARAMETERS
from control_plane.api.gate import ShutdownGate
from control_plane.api.generation.request import DEFAULT_MAX_TOKENS, checked_render_time_s, checked_token_ids
from control_plane.api.text.adapter_texts import AdapterText, AdapterTexts
from control_plane.api.text.conversation import check_conversation
from control_plane.api.wire import timestamp
from control_plane.caller import current_caller
from control_plane.checks import Violations, check_digest, refuse
from control_plane.errors import MotetError
from control_plane.fleet.fleet import Fleet
from control_plane.registry.companions.chat_files import ChatFilesError, read_chat_files
from control_plane.registry.companions.documents import NO_DEFAULTS, GenerationDefaults
from control_plane.registry.companions.generation_config import read_defaults
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.records import ResolvedAdapter
from control_plane.registry.registry import Registry
from control_plane.registry.versions.version_names import VersionName, version_name_of

logger = logging.getLogger(__name__)

SERVICE_NAME = model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name
Context = grpc.aio.ServicerContext[Any, Any]
MAX_TEXT_BYTES = 1 << 20
MAX_TOKEN_IDS = 1 << 18
MAX_TOKENS_AT_ONCE = 4096  # added to a response in one turn of the event loop: 2 ms


@dataclass(frozen=True, slots=True)
class _Named:
    """What a request names, and the texts of it."""

    resolved: ResolvedAdapter | None  # None: the base model
    text: AdapterText

    @property
    def adapter(self) -> dict[str, Any]:
        """The fields of a response that name the adapter."""
        if self.resolved is None:
            return {}
        return {"adapter": f"adapters/{self.resolved.adapter_id}", "adapter_digest": self.resolved.ref.digest}


class ModelService(model_pb2_grpc.ModelServiceServicer):
    """See protos/motet/v1/model.proto."""

    def __init__(
        self,
        *,
        base_model: BaseModel,
        served: WorkerReports,
        texts: AdapterTexts,
        registry: Registry,
        fleet: Fleet,
        gate: ShutdownGate,
        recommended: GenerationDefaults = NO_DEFAULTS,
        response_template: Mapping[str, Any] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`recommended`, `response_template`: the checkpoint's generation_config.json, and tokenizer_config.json's."""
        self._base_model = base_model
        self._served = served
        self._texts = texts
        self._registry = registry
        self._fleet = fleet
        self._gate = gate
        self._recommended = recommended
        self._response_template = response_template
        self._wall_clock = wall_clock
        self._filling = asyncio.Lock()  # of long responses, one piece is added in one turn of the event loop

    async def GetModel(  # noqa: N802 - the stub's name
        self, request: model_pb2.GetModelRequest, _context: Context
    ) -> model_pb2.GetModelResponse:
        """Facts of the base model or of one adapter."""
        named = await self._named(request, Violations())
        base, codec, defaults = self._base_model, named.text.codec, named.text.defaults
        recommended = defaults if defaults is not NO_DEFAULTS else self._recommended
        vocab_size = self._vocab_size(named)
        response_template = named.text.response_template or self._response_template
        return model_pb2.GetModelResponse(
            name=base.name,
            fingerprint=base.served_fingerprint,
            dtype=base.dtype,
            **named.adapter,
            vocab_size=vocab_size,
            max_model_len=self._max_model_len(named),
            eos_token_ids=defaults.eos_token_ids or base.eos_token_ids,
            special_tokens=[
                model_pb2.SpecialToken(id=token_id, token=token) for token_id, token in codec.special_tokens().items()
            ],
            has_tokenizer=codec.has_tokenizer,
            has_chat_template=codec.has_chat_template,
            sampling=_sampling_in_effect(defaults, vocab_size),
            max_tokens=defaults.max_tokens or DEFAULT_MAX_TOKENS,
            recommended_sampling=_message(recommended.sampling),
            labels=() if named.resolved is None else named.resolved.version.labels,
            response_template=json.dumps(response_template, ensure_ascii=False) if response_template else "",
        )

    async def Tokenize(  # noqa: N802 - the stub's name
        self, request: model_pb2.TokenizeRequest, _context: Context
    ) -> model_pb2.TokenizeResponse:
        """Token ids of a text or a conversation."""
        self._gate.check()
        violations, conversation, render_time_s = Violations(), None, None
        kind = request.WhichOneof("input")
        if kind is None:
            violations.add("input", "is not set; send one of text and chat")
        elif (num_bytes := request.chat.ByteSize() or len(request.text.encode())) > MAX_TEXT_BYTES:
            violations.add(kind, f"has {num_bytes} bytes; send at most {MAX_TEXT_BYTES}")
        elif kind == "chat":
            conversation = check_conversation(request.chat, violations)
            given_s = checked_render_time_s(request.chat, violations)
            render_time_s = self._wall_clock() if given_s is None else given_s
        named = await self._named(request, violations)
        caller, codec = current_caller(), named.text.codec
        account = self._fleet.account_of(caller.tenant, caller.host, is_authenticated=caller.principal.is_authenticated)
        adds = request.add_special_tokens if request.HasField("add_special_tokens") else kind == "text"
        if conversation is None:
            token_ids = await codec.encode_text(request.text, tenant=account, add_special_tokens=adds)
        else:
            token_ids = await codec.encode_chat(conversation, render_time_s, tenant=account, add_special_tokens=adds)
        response = model_pb2.TokenizeResponse(
            max_model_len=self._max_model_len(named),
            **named.adapter,
            model_fingerprint=self._base_model.served_fingerprint,
            render_time=None if render_time_s is None else timestamp(render_time_s),
        )
        for start in range(0, len(token_ids), MAX_TOKENS_AT_ONCE):
            async with self._filling:
                if start:
                    await asyncio.sleep(0)  # a text of 1 MiB may have a million tokens
                piece = token_ids[start : start + MAX_TOKENS_AT_ONCE]
                response.token_ids.extend(piece)
                if request.return_tokens:
                    response.tokens.extend(map(codec.spell, piece))
        return response

    async def Detokenize(  # noqa: N802 - the stub's name
        self, request: model_pb2.DetokenizeRequest, _context: Context
    ) -> model_pb2.DetokenizeResponse:
        """The text of token ids."""
        self._gate.check()
        num_ids = len(request.token_ids.ids)
        if num_ids > MAX_TOKEN_IDS:
            raise refuse("token_ids.ids", f"has {num_ids} ids; send at most {MAX_TOKEN_IDS}")
        violations = Violations()
        named = await self._named(request, violations)
        ids = checked_token_ids(request.token_ids.ids, "token_ids.ids", self._vocab_size(named), violations)
        violations.raise_if_any()
        return model_pb2.DetokenizeResponse(
            text=await named.text.codec.decode(ids, skip_special_tokens=request.skip_special_tokens),
            **named.adapter,
            model_fingerprint=self._base_model.served_fingerprint,
        )

    async def _named(
        self,
        request: model_pb2.GetModelRequest | model_pb2.TokenizeRequest | model_pb2.DetokenizeRequest,
        violations: Violations,
    ) -> _Named:
        """What the request names. Raises what is wrong with the request, AdapterNotFound and MotetError."""
        name = VersionName("")
        if request.adapter:
            name = version_name_of(request.adapter, request.adapter_digest, "adapter", violations)
        if request.adapter_digest:
            check_digest(request.adapter_digest, "adapter_digest", violations)
            if not request.adapter:
                violations.add("adapter_digest", "is set without adapter; name the adapter too")
        violations.raise_if_any()

        def find() -> ResolvedAdapter | None:
            if not name.adapter_id:
                return None
            return self._registry.resolve(name.adapter_id, request.adapter_digest, selector=name.selector)

        return _Named(*await self._texts.of(find))

    def _vocab_size(self, named: _Named) -> int:
        own = 0 if named.resolved is None else named.resolved.ref.vocab_size
        return own or self._base_model.vocab_size

    def _max_model_len(self, named: _Named) -> int:
        """0: not known before a worker attached."""
        length = 0 if named.resolved is None else named.resolved.ref.context_length
        return self._served.context_of(length) or 0


def part(
    base_model: BaseModel,
    model_dir: Path,
    served: WorkerReports,
    texts: AdapterTexts,
    registry: Registry,
    fleet: Fleet,
    gate: ShutdownGate,
) -> tuple[Any, ModelService]:
    """The service and what adds it to a server."""
    service = ModelService(
        base_model=base_model,
        served=served,
        texts=texts,
        registry=registry,
        fleet=fleet,
        gate=gate,
        recommended=read_recommended(model_dir, base_model.vocab_size),
        response_template=read_response_template(model_dir),
    )
    return model_pb2_grpc.add_ModelServiceServicer_to_server, service


def read_recommended(model_dir: Path, vocab_size: int) -> GenerationDefaults:
    """What the checkpoint's generation_config.json recommends; nothing where it cannot be served."""
    file = model_dir / "generation_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return read_defaults(config, vocab_size) if isinstance(config, dict) else NO_DEFAULTS
    except FileNotFoundError:
        return NO_DEFAULTS
    except (OSError, ValueError, MotetError) as error:
        logger.warning("the checkpoint recommends nothing that can be served file=%s error=%s", file.name, error)
        return NO_DEFAULTS


def read_response_template(model_dir: Path) -> Mapping[str, Any] | None:
    """The checkpoint's response template; None where it has none that can be read."""
    try:
        return read_chat_files(model_dir).response_template
    except ChatFilesError as error:
        logger.warning("the checkpoint's response template cannot be served error=%s", error)
        return None


def _sampling_in_effect(defaults: GenerationDefaults, vocab_size: int) -> types_pb2.SamplingParams:
    """The sampling values of a request that sets none. A seed is drawn for each request."""
    values = {
        parameter.name: parameter.default
        for parameter in PARAMETERS
        if parameter.default is not None and parameter.name != "seed"
    }
    return _message({**values, "top_k": vocab_size, **defaults.sampling})


def _message(values: Mapping[str, Any]) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(**values)
