"""A step's sequences as the native ops read them: the mirror of AttentionStep in attention.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.native import integers, pointers


class _Sequences(ctypes.Structure):
    _fields_ = [  # ctypes wants a list
        *integers("count"),
        *pointers("sequences", "tokens", "num_queries", "context_lens"),
    ]


class AttentionStep(ctypes.Structure):
    """The tables of a step, its sequences with one query, and those with several; the longest contexts first."""

    _fields_ = [  # ctypes wants a list
        *pointers("tables"),
        *integers("table_width"),
        ("decodes", _Sequences),
        ("prefills", _Sequences),
    ]
    kept: list[npt.NDArray[np.int32]]  # what the pointers point to

    @classmethod
    def build(
        cls, tables: npt.NDArray[np.int32], query_start: Sequence[int], context_lens: Sequence[int]
    ) -> AttentionStep:
        """A step of the sequences; the arguments are those of AttentionBatch.build."""
        starts = np.asarray(query_start, dtype=np.int32)
        lens, counts = np.asarray(context_lens, dtype=np.int32), np.diff(starts)
        step = cls(table_width=tables.shape[1])
        step.kept = [np.ascontiguousarray(tables)]
        step.tables = step.kept[0].ctypes.data
        for part, sequences in (
            (step.decodes, np.flatnonzero(counts == 1)),
            (step.prefills, np.flatnonzero(counts > 1)),
        ):
            order = sequences[np.argsort(-lens[sequences], kind="stable")].astype(np.int32)
            part.count = len(order)
            arrays = {
                "sequences": order,
                "tokens": starts[order],
                "num_queries": counts[order],
                "context_lens": lens[order],
            }
            for name, array in arrays.items():
                setattr(part, name, array.ctypes.data)
                step.kept.append(array)
        return step
