"""Where Motet's responses differ from vLLM's, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """Lines `CASE - LINE` of vLLM alone, and `CASE + LINE` of Motet alone, that the pattern matches as a whole."""

    pattern: str
    reason: str


DIFFERENCES = [
    # ---- vLLM's further keys ----
    Difference(
        r".* - (choices\[\]\.|response\.|output\[\]\.|item\.|tools\[\]\.)*("
        r"allowed_callers|async|caller|defer_loading|description|ec_transfer_params|input_messages|"
        r"kv_transfer_params|max_tool_calls|message\.annotations|message\.audio|message\.function_call|"
        r"message\.reasoning|message\.refusal|metrics|namespace|output_messages|output_schema|phase|"
        r"prompt|prompt_text|prompt_token_ids|reasoning|routed_experts|service_tier|stop_reason|"
        r"token_ids|usage\.completion_tokens_details|usage\.prompt_tokens_details|prompt_logprobs): null",
        "vLLM writes keys without a value as null; a client reads the same from a key that is not there",
    ),
    Difference(r"models - data\[\]\.permission.*", "OpenAI removed `permission` from its models in 2023"),
    Difference(r"models .*max_model_len: .*", "an adapter has the length of its base model, where vLLM says null"),
    Difference(r"models \+ has_more: truth", "a list has pages, as OpenAI's lists do"),
    Difference(
        r".* - choices\[\]\.stop_reason: text", "vLLM's own key; the string that ended a text is known to callers"
    ),
    Difference(r".* \+ choices\[\]\.logprobs\.refusal: null", "OpenAI's format has this key"),
    # ---- reasoning and tools ----
    Difference(
        r".*[+-] .*(choices\[\]\.(message|delta)\.(reasoning|reasoning_content)|order reasoning_content).*",
        "vLLM ran without its parser of reasoning, and calls the key `reasoning`",
    ),
    Difference(
        r"chat: JSON object [+-] finish_reason is (length|stop)",
        "a model that has reasoning may reason before it writes the object, and reached `max_tokens`; vLLM ran "
        "without its parser of reasoning",
    ),
    Difference(
        r"chat: tool (required|by name) - choices\[\]\.message\.content: text|"
        r"chat: tool (required|by name) \+ choices\[\]\.message\.content: null",
        "content beside a call is null where there is none, as OpenAI has it; vLLM writes an empty text",
    ),
    Difference(
        r"chat stream: tools [+-] choices\[\]\.delta\.content: .*",
        "a delta of a call has no key `content`; vLLM writes null",
    ),
    # ---- usage ----
    Difference(
        r".* [+-] (response\.)?usage\.(prompt_tokens_details|completion_tokens_details).*",
        "tokens from the prefix cache are always counted; vLLM does on a flag of its server",
    ),
    Difference(
        r".* stream: usage [+-] usage: .*", "with include_usage each chunk has `usage: null`, as OpenAI documents it"
    ),
    # ---- streams ----
    Difference(
        r"(chat|completion) stream.* [+-] order (content|text|finish=length|content finish=length|text finish=length|)",
        "the finish reason has a chunk of its own, as OpenAI's chats have it; vLLM joins it to the last text",
    ),
    Difference(
        r"completion stream: log-probabilities [+-] choices\[\]\.logprobs: .*",
        "the last chunk has no token, and no log-probabilities",
    ),
    # ---- responses ----
    Difference(
        r"response.* [+-] (response\.)?(completed_at|metadata|reasoning.*|store|text.*|top_logprobs|error|"
        r"frequency_penalty|presence_penalty): .*",
        "the keys of OpenAI's Response with the values that hold; vLLM leaves some out, or writes null",
    ),
    Difference(
        r"response.* [+-] (response\.|item\.)?(output\[\]\.|content\[\]\.|part\.)*(content\[\]\.|)(logprobs|status|"
        r"summary|part\.logprobs): .*",
        "lists without entries and the status of an item are written out; vLLM writes null",
    ),
    Difference(
        r"response.* - (response\.)?usage\.(input|output)_tokens_details\..*",
        "vLLM counts the turns of tools that its server runs; how much of a prompt the cache keeps is not known here",
    ),
    # ---- refusals ----
    Difference(
        r"refused.* [+-] (error\.(code|param): .*|type is .*|code is .*)",
        "`code` is OpenAI's word or null, `type` one of OpenAI's; vLLM has the status and names of its classes",
    ),
    Difference(
        r"refused.* [+-] param is .*",
        "`param` is the name of the field in the body; vLLM leaves it out, or names it otherwise",
    ),
    Difference(r"refused: unknown field [+-] .*", "an unknown field is refused by name; vLLM takes no notice of it"),
    Difference(
        r"refused: (route|method) [+-] (detail|error).*",
        "every refusal has OpenAI's body; vLLM's framework has its own",
    ),
    Difference(
        r"refused: adapter that is not there [+-] .*",
        "a place outside of the operator's roots is forbidden, whether or not there is anything",
    ),
]


def reason_of(line: str) -> str | None:
    """The reason of a difference; None where it has none."""
    return next((each.reason for each in DIFFERENCES if re.fullmatch(each.pattern, line)), None)
