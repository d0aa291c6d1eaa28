"""Completions and chat completions as OpenAI's clients read them, whole and as the chunks of a stream."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from motet import Chunk, FinishReason, TokenLogprob, TokenLogprobs

from gateway.openai.chats.turns import Turn


@dataclass(slots=True)
class Choice:
    """One completion as it comes."""

    index: int
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    has_begun: bool = False
    turn: Turn | None = None  # reads what a chat's text has besides content
    deltas: list[dict[str, Any]] = field(default_factory=list)  # of a chat: what the last chunk added
    held_tokens: int = 0  # of a chat: tokens whose text no delta had yet
    held_text: str = ""  # and that text
    offset: int = 0  # characters of the tokens so far
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="ignore")
    )


class Reply:
    """What is returned for one request. `add` takes the chunks of its generations."""

    def __init__(
        self,
        model: str,
        *,
        is_chat: bool,
        n: int,
        echoed: Sequence[str] = (),
        num_prompts: int = 1,
        prefix: str | None = None,
    ) -> None:
        """`prefix`: of the id, in place of that of chats and completions."""
        self.id = f"{prefix or ('chatcmpl-' if is_chat else 'cmpl-')}{uuid.uuid4().hex}"
        self.digest = ""
        self.choices = [Choice(index) for index in range(n * num_prompts)]
        self._model = model
        self._is_chat = is_chat
        self._n = n
        self._echoed = echoed
        self._created = int(time.time())
        self._fingerprint: str | None = None
        self._prompt_tokens: dict[int, tuple[int, int]] = {}  # by prompt: all, cached
        self._completion_tokens = 0
        self._reasoning_tokens: int | None = None  # None: completions are not read for reasoning

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        headers = {"x-request-id": self.id}
        return {**headers, "x-motet-adapter-digest": self.digest} if self.digest else headers

    def read_with(self, make_turn: Callable[[], Turn]) -> None:
        """Read each completion for more than its content. Call it before the first chunk is added."""
        self._reasoning_tokens = 0
        for choice in self.choices:
            choice.turn = make_turn()

    def add(self, position: int, chunk: Chunk, model_fingerprint: str) -> Choice:
        """Take the next chunk of a prompt's generation; the choice that it belongs to."""
        if self._fingerprint is None:
            self.digest = chunk.adapter_digest
            self._fingerprint = f"fp_{(chunk.adapter_digest or model_fingerprint)[:16]}"
        choice = self.choices[position * self._n + chunk.index]
        if chunk.finish_reason is not None:
            choice.finish_reason = "length" if chunk.finish_reason is FinishReason.LENGTH else "stop"
        is_last = chunk.finish_reason is not None
        if choice.turn is not None:
            choice.deltas = choice.turn.read(chunk.text, is_last=is_last)
            self._count_reasoning(choice, len(chunk.token_ids), chunk.text)
            if choice.turn.ends_with_calls and choice.finish_reason == "stop":
                choice.finish_reason = "tool_calls"
        else:
            choice.deltas = [{"content": chunk.text}] if chunk.text else []
        if chunk.usage is not None:
            self._prompt_tokens[position] = chunk.usage.prompt_tokens, chunk.usage.cached_tokens
            self._completion_tokens += chunk.usage.completion_tokens
        return choice

    def whole(self) -> dict[str, Any]:
        """The response that is not streamed."""
        kind = "chat.completion" if self._is_chat else "text_completion"
        choices = []
        for choice in self.choices:
            text = self._echo(choice) + "".join(choice.text)
            message = {"content": text, "refusal": None} if choice.turn is None else choice.turn.message()
            said = {"message": {"role": "assistant", **message}} if self._is_chat else {"text": text}
            logprobs = self.logprobs_of(choice, choice.logprobs) if choice.logprobs else None
            choices.append({"index": choice.index, **said, "logprobs": logprobs, "finish_reason": choice.finish_reason})
        return {**self._head(kind), "choices": choices, "usage": self.usage()}

    def events(self, choice: Choice, chunk: Chunk, *, with_usage: bool) -> Iterator[dict[str, Any]]:
        """The events of a stream for a chunk."""
        usage = {"usage": None} if with_usage else {}
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"

        def event(said: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None) -> dict[str, Any]:
            shown = {"index": choice.index, **said, "logprobs": logprobs, "finish_reason": finish_reason}
            return {**self._head(kind), "choices": [shown], **usage}

        if not choice.has_begun:
            choice.has_begun = True
            if self._is_chat:
                yield event({"delta": {"role": "assistant", "content": ""}})
            elif echo := self._echo(choice):
                yield event({"text": echo})
        logprobs = self.logprobs_of(choice, chunk.logprobs) if chunk.logprobs else None
        added = [{"delta": delta} for delta in choice.deltas] if self._is_chat else [{"text": chunk.text}]
        if self._is_chat and logprobs and not added:
            added = [{"delta": {"content": ""}}]  # tokens whose text is held back
        for said in added if self._is_chat or chunk.text or logprobs else ():
            yield event(said, logprobs)
            logprobs = None
        if chunk.finish_reason is not None:
            yield event({"delta": {}} if self._is_chat else {"text": ""}, None, choice.finish_reason)

    def usage_event(self) -> dict[str, Any]:
        """The last chunk of a stream with `include_usage`."""
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": self.usage()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }

    def usage(self) -> dict[str, Any]:
        """Tokens of the prompts and the completions that have ended."""
        prompt = sum(count for count, _ in self._prompt_tokens.values())
        details: dict[str, Any] = {}
        if self._reasoning_tokens is not None:
            details["completion_tokens_details"] = {"reasoning_tokens": self._reasoning_tokens}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self._prompt_tokens.values())},
            **details,
        }

    def _count_reasoning(self, choice: Choice, num_tokens: int, text: str) -> None:
        """Count tokens whose text is reasoning, at least in part. The parser may hold a text back for some chunks.

        Of tokens that came together, those before the end of the reasoning are found by the number of characters.
        """
        choice.held_tokens += num_tokens
        choice.held_text += text
        if not choice.deltas:
            return
        reasoning = [delta["reasoning_content"] for delta in choice.deltas if "reasoning_content" in delta]
        if self._reasoning_tokens is not None and reasoning:
            begin = choice.held_text.find(reasoning[-1])  # content comes behind it, and may have the same text
            end = len(choice.held_text) if begin < 0 else begin + len(reasoning[-1])
            share = end / max(1, len(choice.held_text))
            self._reasoning_tokens += max(min(1, choice.held_tokens), round(choice.held_tokens * share))
        choice.held_tokens, choice.held_text = 0, ""

    def _echo(self, choice: Choice) -> str:
        return self._echoed[choice.index // self._n] if self._echoed else ""

    def logprobs_of(self, choice: Choice, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Log-probabilities in the form of the response."""
        if self._is_chat:
            return {"content": [_position(each) for each in logprobs], "refusal": None}
        offsets = []
        for each in logprobs:
            offsets.append(choice.offset)
            choice.offset += len(choice.decoder.decode(each.token))
        return {
            "tokens": [token_text(each.token, each.token_id) for each in logprobs],
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": [_by_text(each) for each in logprobs],
            "text_offset": offsets,
        }


def _by_text(each: TokenLogprobs) -> dict[str, float]:
    """The most likely tokens, and the one that was chosen."""
    chosen = TokenLogprob(each.token_id, each.logprob, each.token)
    return {token_text(one.token, one.token_id): one.logprob for one in (*each.top, chosen)}


def _position(each: TokenLogprobs) -> dict[str, Any]:
    top = [{"token": token_text(one.token, one.token_id), **_of(one.token, one.logprob)} for one in each.top]
    return {"token": token_text(each.token, each.token_id), **_of(each.token, each.logprob), "top_logprobs": top}


def _of(token: bytes, logprob: float) -> dict[str, Any]:
    return {"bytes": list(token), "logprob": logprob}


def token_text(token: bytes, token_id: int) -> str:
    """A token as text. One that is not text is written so that two of them differ, as OpenAI and vLLM write them."""
    if not token:
        return f"token_id:{token_id}"
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
