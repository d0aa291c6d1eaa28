"""Prompts, sampling parameters and adapters, one for all or one each, as requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict, TypeVar, cast

from motet.errors import invalid_field
from motet.inputs.conversations import ChatMessage, ChatTurn
from motet.offline.vllm_params import options_of
from motet.requests import GenerateOptions, Prompt

T = TypeVar("T")

# Arguments of vLLM's chat() that do not exist here, and what to do instead.
_CONVERSATION_OF_VLLM = {
    "chat_template": "leave it out: the template is the adapter's or the checkpoint's",
    "chat_template_kwargs": "use template_kwargs",
    "lora_request": "use adapter, the name of one that is registered",
}


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]


class SamplingParams(GenerateOptions, total=False):
    """How to generate, of one prompt or of all: SamplingParams(max_tokens=64, temperature=0.7). It is a dictionary.

    Its keys are those of GenerateOptions, and some of vLLM's. Left out or None: the server's default.
    """

    include_stop_str_in_output: bool | None  # vLLM's name of include_stop


OfflinePrompt: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt
OfflineAdapter: TypeAlias = str | Mapping[str, float] | None  # a name; several with scales; the base model
Conversation: TypeAlias = Sequence[ChatTurn]


@dataclass(frozen=True, slots=True)
class Item:
    """One request."""

    prompt: Prompt
    adapter: OfflineAdapter
    options: GenerateOptions


def prompts_of(prompts: OfflinePrompt | Sequence[OfflinePrompt], field: str = "prompts") -> list[str | Sequence[int]]:
    """Every prompt as text or token ids. Raises InvalidArgument.

    Worked examples: "a" and {"prompt": "a"} give ["a"]; [5, 6] gives [[5, 6]], one prompt; ["a", [5, 6]] gives two.
    """
    if isinstance(prompts, str | Mapping) or _is_token_ids(prompts):
        return [_prompt(cast(OfflinePrompt, prompts), field)]
    if not isinstance(prompts, Sequence):
        raise invalid_field(field, f"is {type(prompts).__name__}; give a prompt or a list of prompts")
    return [_prompt(cast(OfflinePrompt, prompt), f"{field}[{index}]") for index, prompt in enumerate(prompts)]


def conversations_of(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Every conversation. One message, or one list of messages, is one conversation. Raises InvalidArgument."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise invalid_field(
            "messages", f"is {type(messages).__name__}; give a list of messages, or a list of such lists"
        )
    if not messages or isinstance(messages[0], Mapping | ChatMessage):
        return [cast(Conversation, messages)]
    return list(cast(Sequence[Conversation], messages))


def items_of(
    prompts: Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    adapter: OfflineAdapter | Sequence[OfflineAdapter],
    options: Mapping[str, Any],
) -> list[Item]:
    """One request for each prompt. `options`: of all of them. Raises InvalidArgument."""
    all_sampling = _each("sampling", sampling, len(prompts), Mapping)
    adapters = _each("adapter", adapter, len(prompts), (str, Mapping))
    items = []
    for prompt, own, name in zip(prompts, all_sampling, adapters, strict=True):
        if unknown := sorted(set(options) - GenerateOptions.__annotations__.keys()):
            advice = _CONVERSATION_OF_VLLM.get(unknown[0], "ConversationOptions lists what there is")
            raise invalid_field(unknown[0], f"is not known; {advice}")
        request = cast(GenerateOptions, {**options_of(own or {}), **options})
        if taken := [key for key in ("adapter", "adapters") if key in request]:
            raise invalid_field(f"sampling.{taken[0]}", "an adapter is named by adapter=, one for all or a list")
        if isinstance(name, str):
            request["adapter"] = name
        elif name is not None:
            request["adapters"] = name
        items.append(Item(prompt, name, request))
    return items


def either_sampling(
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
) -> SamplingParams | Sequence[SamplingParams] | None:
    """The one that is given. Raises InvalidArgument."""
    if sampling is not None and sampling_params is not None:
        raise invalid_field("sampling_params", "is another name of sampling, which is given too; leave one of them out")
    return sampling if sampling_params is None else sampling_params


def _each(field: str, given: Any, num_prompts: int, one: type | tuple[type, ...]) -> list[Any]:
    if given is None or isinstance(given, one):
        return [given] * num_prompts
    if not isinstance(given, Sequence):
        raise invalid_field(field, f"is {type(given).__name__}; give one for all prompts, or a list with one each")
    if len(given) != num_prompts:
        raise invalid_field(field, f"has {len(given)} values for {num_prompts} prompts; give one for all, or one each")
    for index, value in enumerate(given):
        if value is not None and not isinstance(value, one):
            raise invalid_field(f"{field}[{index}]", f"is {type(value).__name__}")
    return list(given)


def _prompt(prompt: OfflinePrompt, field: str) -> str | Sequence[int]:
    if isinstance(prompt, Mapping):
        if prompt.keys() == {"prompt"}:
            return _prompt(cast(TextPrompt, prompt)["prompt"], f"{field}.prompt")
        if prompt.keys() == {"prompt_token_ids"}:
            return _prompt(cast(TokensPrompt, prompt)["prompt_token_ids"], f"{field}.prompt_token_ids")
        raise invalid_field(field, f'has {", ".join(map(repr, prompt))}; give "prompt" or "prompt_token_ids"')
    if isinstance(prompt, str) or _is_token_ids(prompt):
        return prompt
    raise invalid_field(field, f"is {prompt!r:.100}; give text, a list of token ids, or use chat() for messages")


def _is_token_ids(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and isinstance(value[0], int)
