"""Checks constraints in child processes, one for each vocabulary, and keeps what came out.

A child that takes too long or dies is replaced for the next constraint. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from control_plane.errors import Unavailable
from control_plane.framed_child.child import FramedChild
from control_plane.scheduler.types import Constraint, Vocabulary

logger = logging.getLogger(__name__)

MAX_CHILDREN = 4  # each about 100 MB for a vocabulary of 128,000 tokens
MAX_KEPT = 512  # constraints whose result is kept


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """What one constraint may take."""

    cpu_limit_s: float = 0.1  # CPU time of the child, seconds
    memory_limit_bytes: int = 512 * 2**20  # beyond what an idle child has
    wall_limit_s: float = 10.0  # for a child that neither computes nor responds, seconds
    start_limit_s: float = 60.0  # for a child to read the vocabulary, seconds


class ConstraintRefused(Exception):
    """The constraint cannot be used; the message is for the caller."""


class ConstraintCompiler:
    """Constraints, checked and ready to be sent."""

    def __init__(self, limits: CompileLimits = CompileLimits()) -> None:
        self._limits = limits
        self._children: OrderedDict[str, FramedChild] = OrderedDict()  # by the digest of the vocabulary, last used last
        self._kept: OrderedDict[str, Constraint | str] = OrderedDict()  # by digest; a text says what is wrong
        self._lock = asyncio.Lock()  # one constraint at a time
        self._is_closed = False

    async def compile(self, kind: str, value: Any, vocabulary: Vocabulary) -> Constraint:
        """The constraint over this vocabulary. Raises ConstraintRefused or Unavailable."""
        request = json.dumps({"kind": kind, "value": value}).encode()
        digest = hashlib.sha256(vocabulary.digest.encode() + request).hexdigest()
        async with self._lock:
            found = self._kept.get(digest)
            if found is None:
                found = self._kept[digest] = await self._compiled(digest, request, vocabulary)
                while len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(digest)
        if isinstance(found, str):
            raise ConstraintRefused(found)
        return found

    async def close(self) -> None:
        """End every child at once."""
        self._is_closed = True
        for child in list(self._children.values()):
            await child.end()
        self._children.clear()

    async def _compiled(self, digest: str, request: bytes, vocabulary: Vocabulary) -> Constraint | str:
        child = await self._child(vocabulary)
        try:
            async with asyncio.timeout(self._limits.wall_limit_s):
                text, is_grammar = await child.ask(request)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            self._children.pop(vocabulary.digest, None)
            status = await child.end()
            logger.warning("constraint compiler ended pid=%d status=%d", child.process.pid, status)
            return (
                f"takes more than {self._limits.cpu_limit_s * 1000:g} ms or "
                f"{self._limits.memory_limit_bytes >> 20} MiB to be compiled; give a simpler one"
            )
        except BaseException:
            self._children.pop(vocabulary.digest, None)
            await child.end()
            raise
        return Constraint(digest, text, vocabulary) if is_grammar else text

    async def _child(self, vocabulary: Vocabulary) -> FramedChild:
        child = self._children.get(vocabulary.digest)
        if child is not None:
            self._children.move_to_end(vocabulary.digest)
            return child
        if self._is_closed:
            raise Unavailable("the server is shutting down; try another one or try again in a moment")
        while len(self._children) >= MAX_CHILDREN:
            _, oldest = self._children.popitem(last=False)
            await oldest.end()
        setup = {
            "tokenizer": vocabulary.tokenizer,
            "num_tokens": vocabulary.num_tokens,
            "end_token_ids": vocabulary.end_token_ids,
            "cpu_limit_s": self._limits.cpu_limit_s,
            "memory_limit_bytes": self._limits.memory_limit_bytes,
        }
        message = await asyncio.to_thread(lambda: json.dumps(setup).encode())
        child = None
        try:
            child = await FramedChild.start("control_plane.constraints.compile_process")
            async with asyncio.timeout(self._limits.start_limit_s):
                text, is_ready = await child.ask(message)
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            if child is not None:
                await child.end()
            logger.error("constraint compiler not started error=%s", error)
            raise Unavailable("the process that checks constraints could not be started; try again") from error
        except BaseException:
            if child is not None:
                await child.end()
            raise
        if not is_ready:
            await child.end()
            raise ConstraintRefused(f"cannot be used with the tokenizer of this model: {text}")
        self._children[vocabulary.digest] = child
        return child
