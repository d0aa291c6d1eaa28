"""Makes requests, scripts what the fleet responds, and reads the streams."""

from __future__ import annotations

from typing import Any

from motet.v1 import generation_pb2, generation_pb2_grpc, types_pb2

from control_plane.fleet.requests.streams import JobEvent
from tests.control_plane.api.fakes import Api
from tests.control_plane.api.tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()


def ids_of(*tokens: str) -> list[int]:
    vocab = TOKENIZER.get_vocab()
    return [vocab[token] for token in tokens]


def request(**fields: Any) -> generation_pb2.GenerateRequest:
    if not {"text", "chat", "token_ids"} & set(fields):
        fields["token_ids"] = types_pb2.TokenIds(ids=[5, 6, 7])
    return generation_pb2.GenerateRequest(**fields)


def stopping(**fields: Any) -> generation_pb2.GenerateRequest:
    return request(stopping=types_pb2.StoppingParams(**fields))


def script(api: Api, *events: JobEvent | Exception) -> None:
    api.fleet.on_submit = lambda job, _request: job.script(*events)


async def generate(api: Api, message: generation_pb2.GenerateRequest) -> list[generation_pb2.GenerateResponse]:
    return [response async for response in api.stub(generation_pb2_grpc.GenerationServiceStub).Generate(message)]


def text_of(responses: list[generation_pb2.GenerateResponse]) -> str:
    return "".join(response.delta.text for response in responses)


def tokens_of(responses: list[generation_pb2.GenerateResponse]) -> list[int]:
    return [token for response in responses for token in response.delta.token_ids]
