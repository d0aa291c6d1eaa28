"""Whether the base model that an adapter's configuration names is clearly another one than the served one.

The name is never followed: it is a repository, or a path on the trainer's machine, and proves nothing. So only the last
part of both names is compared, and only where both say how large their model is.
"""

from __future__ import annotations

import re
from pathlib import Path

from control_plane.checks import quoted

MAX_NAME_CHARS = 1024  # longer ones are not looked at
_SIZE = re.compile(r"\d+(?:\.\d+)?[bm]")  # 8b, 0.5b, 125m
_WORDS = re.compile(rf"{_SIZE.pattern}(?![a-z])|\d+(?:\.\d+)*|[a-z]+")
# How the same weights are stored or who stored them.
_STORAGE = re.compile(r"bnb|\d*bit|gptq|awq|gguf|mlx|hf|unsloth|quantized|dynamic|(?:fp|bf|int)\d+|w\d+a\d+")
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
# Trained further: other weights than those of the model whose name has no such word.
_TUNED = frozenset({"instruct", "chat", "it", "coder", "code", "math", "thinking"})


def base_warnings(named: str, model_dir: Path) -> tuple[str, ...]:
    """What to say of an adapter that names this base model, for the model of `model_dir`. Mostly nothing."""
    own, served = last_part(named), last_part(str(model_dir.resolve()))
    if not are_different(own, served):
        return ()
    return (
        f"adapter_config.json names {quoted(own)} as its base model, and {quoted(served)} is served; if these are "
        "different models, the adapter was trained for another one",
    )


def last_part(name: str) -> str:
    """The last part of a repository's name or of a path; of a directory of the Hub's cache, the repository's."""
    if len(name) > MAX_NAME_CHARS:
        return ""
    parts = [part for part in re.split(r"[/\\]+", name.strip()) if part]
    if len(parts) >= 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].rpartition("--")[2]
    return parts[-1] if parts else ""


def are_different(own: str, served: str) -> bool:
    """Whether two names are clearly those of different models.

    1. A name without a size says too little ("model", "checkpoint-500", a commit): they may be the same.
    2. Each has a word that the other lacks ("Llama-3-8B", "Llama-3.1-8B"): different.
    3. One has more words ("Meta-Llama-3-8B", "Llama-3-8B"): different if one of these says that it was trained further.
    """
    words, others = _words_of(own), _words_of(served)
    if not (_has_size(words) and _has_size(others)):
        return False
    if words <= others or others <= words:
        return bool((words ^ others) & _TUNED)
    return True


def _words_of(name: str) -> frozenset[str]:
    name = "" if _COMMIT.fullmatch(name) else name.lower()
    parts = [part for part in re.split(r"[-_ ]+", name) if not _STORAGE.fullmatch(part)]
    return frozenset(word for part in parts for word in _WORDS.findall(part))


def _has_size(words: frozenset[str]) -> bool:
    return any(_SIZE.fullmatch(word) for word in words)
