"""The score head that PEFT saves with an adapter of a sequence classifier, and its chunk in the packed layout.

transformers' sequence classifiers of decoder models apply `score`, a linear without or with a bias, to the last hidden
state of the last token. PEFT trains it as a whole and saves it under its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contract.packed_layout import SCORE_BIAS, SCORE_WEIGHT, ScoreHeadSize
from control_plane.errors import FieldViolation
from control_plane.registry.model.served_modules import ModuleKind
from control_plane.registry.peft.chunks.chunk_writer import PackedTensor
from control_plane.registry.peft.problems import Problems
from control_plane.registry.peft.safetensors_header import CHECK_BASE, TensorEntry, shorten
from control_plane.registry.peft.target_modules import TargetModules

MAX_SCORE_LABELS = 4096
_SEQ_CLS = "SEQ_CLS"
# The module's name, and that of PEFT's wrapper which some versions leave in.
_PREFIXES = tuple(
    f"base_model.model.{name}{wrapper}" for name in ("score", "classifier") for wrapper in (".modules_to_save", "")
)
_OTHER_TASKS = {
    "TOKEN_CLS": "its head classifies each token, which is not served; train a sequence classifier (SEQ_CLS)",
    "QUESTION_ANS": "its head marks a part of a text, which is not served; train a sequence classifier (SEQ_CLS)",
}


@dataclass(frozen=True, slots=True)
class LabelNames:
    """What adapter_config.json says of the classes."""

    task_type: str  # empty: not said
    names: tuple[str, ...]  # by index; empty: not said
    problem_type: str  # in transformers' words; empty: not said


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """A score head in an adapter's file."""

    weight: TensorEntry  # [num_labels, in_features]
    bias: TensorEntry | None  # [num_labels]
    labels: tuple[str, ...]
    problem_type: str

    @property
    def size(self) -> ScoreHeadSize:
        """What its size in an arena depends on."""
        num_labels, in_features = self.weight.shape
        return ScoreHeadSize(num_labels, in_features, self.bias is not None)

    @property
    def tensors(self) -> list[PackedTensor]:
        """Its chunk's."""
        packed = [PackedTensor(SCORE_WEIGHT, self.weight, "float32")]
        return packed if self.bias is None else [*packed, PackedTensor(SCORE_BIAS, self.bias, "float32")]

    @property
    def described(self) -> dict[str, Any]:
        """The manifest's words for it."""
        size = self.size
        return {
            "has_bias": size.has_bias,
            "in_features": size.in_features,
            "labels": list(self.labels),
            "num_labels": size.num_labels,
            "problem_type": self.problem_type,
        }


def head_entries(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors of a score head, by "weight" and "bias"."""
    names = {f"{prefix}.{part}": part for prefix in _PREFIXES for part in ("weight", "bias")}
    return {names[name]: entry for name, entry in entries.items() if name in names}


def plan_score_head(
    found: Mapping[str, TensorEntry], said: LabelNames, targets: TargetModules, problems: Problems
) -> ScoreHead | None:
    """The head in these tensors, or None if there is none or it cannot be served. Notes all that is wrong."""
    if not found:
        if said.names:
            problems.add(FieldViolation("id2label", "is set, but the file has no score head; remove it, or save it"))
        return None
    weight, bias = found.get("weight"), found.get("bias")
    wrong: list[FieldViolation] = []
    if weight is None:
        problems.add(FieldViolation("score.weight", "is missing, score.bias is in the file; save the adapter again"))
        return None
    name = shorten(weight.name)
    if said.task_type != _SEQ_CLS:
        wrong.append(FieldViolation(name, _of_other_task(said.task_type)))
    width = _hidden_width(targets)
    if len(weight.shape) != 2 or not 1 <= weight.shape[0] <= MAX_SCORE_LABELS or width not in (None, weight.shape[1]):
        expected = f"[1 to {MAX_SCORE_LABELS} labels, {'hidden size' if width is None else width}]"
        wrong.append(FieldViolation(name, f"shape {list(weight.shape)}, expected {expected}; {CHECK_BASE}"))
    num_labels = weight.shape[0] if weight.shape else 0
    if bias is not None and bias.shape != (num_labels,):
        wrong.append(FieldViolation(shorten(bias.name), f"shape {list(bias.shape)}, expected {[num_labels]}"))
    if said.names and len(said.names) != num_labels:
        wrong.append(FieldViolation("id2label", f"has {len(said.names)} labels, the score head has {num_labels}"))
    for violation in wrong:
        problems.add(violation)
    if wrong:
        return None
    labels = said.names or tuple(f"LABEL_{index}" for index in range(num_labels))
    return ScoreHead(weight, bias, labels, said.problem_type)


def _of_other_task(task_type: str) -> str:
    if task_type in _OTHER_TASKS:
        return f"task_type is {task_type}: {_OTHER_TASKS[task_type]}"
    return (
        f"is a classification head, and task_type is {task_type or 'null'}; set it to {_SEQ_CLS} if the adapter was "
        "trained on AutoModelForSequenceClassification, else save the adapter without that head"
    )


def _hidden_width(targets: TargetModules) -> int | None:
    """Width of the last hidden state: what the model's own head reads. None: not known, and a worker will check."""
    modules = targets.reported or targets.served
    return next((module.in_features for module in modules.values() if module.kind is ModuleKind.HEAD), None)
