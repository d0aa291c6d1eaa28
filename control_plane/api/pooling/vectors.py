"""From the vectors that workers return to the numbers that clients get."""

from __future__ import annotations

import numpy as np
from motet.v1 import pooling_pb2

from control_plane.checks import refuse
from control_plane.scheduler.types import Vector

MAX_RESPONSE_VALUES = 900_000  # 3.6 MB: a gRPC client takes messages of up to 4 MB by default


def embedding_of(vector: Vector, *, dimensions: int | None, is_normalized: bool) -> Vector:
    """The first values of the vector, divided by their length where that is not 0.

    Raises InvalidRequest if the vector has fewer values than are wanted.
    """
    if dimensions is not None and dimensions > len(vector):
        raise refuse("dimensions", f"is {dimensions}; this model's embeddings have {len(vector)} values")
    values = vector[:dimensions].astype(np.float64)
    length = float(np.sqrt(np.square(values).sum()))
    if is_normalized and length > 0:
        values /= length
    return values.astype(np.float32)


def check_response_size(num_inputs: int, num_values: int) -> None:
    """Raises InvalidRequest if a response with so many values for each input would be too large for a client."""
    if num_inputs * num_values > MAX_RESPONSE_VALUES:
        raise refuse(
            "inputs",
            f"{num_inputs} inputs with {num_values} values each are more than one response holds, "
            f"{MAX_RESPONSE_VALUES} values; send fewer inputs, or set dimensions",
        )


def probabilities_of(logits: Vector, problem_type: int) -> Vector:
    """What the logits of a score head mean, float32 [num_labels]; empty for a regression."""
    values = logits.astype(np.float64)
    if problem_type == pooling_pb2.PROBLEM_TYPE_REGRESSION:
        return np.zeros(0, dtype=np.float32)
    if problem_type == pooling_pb2.PROBLEM_TYPE_MULTI_LABEL:
        # exp of a negative number alone: no overflow for any logit.
        small = np.exp(-np.abs(values))
        probabilities = np.where(values >= 0, 1 / (1 + small), small / (1 + small))
    else:
        exponentials = np.exp(values - values.max())
        probabilities = exponentials / exponentials.sum()
    return np.asarray(probabilities, dtype=np.float32)
