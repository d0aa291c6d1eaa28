"""What each prompt of an `LLM` gave, in the shape that users of vLLM know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from motet.errors import MotetError
from motet.offline.inputs import OfflineAdapter
from motet.requests import Prompt
from motet.types import Completion, Generation, TokenLogprobs

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one prompt gave."""

    prompt: Prompt  # as it was given
    adapter: OfflineAdapter  # as it was given
    generation: Generation | None  # all of it; None where it failed
    error: MotetError | None = None  # why it failed

    @property
    def outputs(self) -> tuple[Completion, ...]:
        """The completions, by index; none where it failed."""
        return self.generation.completions if self.generation else ()

    @property
    def request_id(self) -> str:
        """The request's id in the server's log; empty where it failed."""
        return self.generation.started.request_id if self.generation else ""

    @property
    def finished(self) -> bool:
        """Whether there is a generation; results are whole, so that it is false only for an error."""
        return self.generation is not None

    @property
    def num_cached_tokens(self) -> int | None:
        """Tokens of the prompt that came from the prefix cache; None where it failed."""
        return self.generation.started.cached_tokens if self.generation else None

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt's tokens from the second on, where requested."""
        return self.generation.started.prompt_logprobs if self.generation else ()


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of one prompt."""

    embedding: tuple[float, ...]

    @property
    def hidden_size(self) -> int:
        """How many values it has."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The classes of one prompt."""

    probs: tuple[float, ...]  # one for each class; empty for a regression
    logits: tuple[float, ...]  # one for each class
    label: str  # the likeliest; of a regression, the label of the largest value

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.logits)


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[T]):
    """What one prompt of embed() or classify() gave."""

    prompt: Prompt  # as it was given
    adapter: OfflineAdapter  # as it was given
    outputs: T  # EmbeddingOutput or ClassificationOutput
    num_prompt_tokens: int
    num_cached_tokens: int  # of these, from the prefix cache
