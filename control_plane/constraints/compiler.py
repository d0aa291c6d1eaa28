"""Checks constraints in child processes, one for each vocabulary, and keeps what came out.

A child that takes too long or dies is replaced for the next constraint. Tenants take turns. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import signal
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from control_plane.constraints.turns import Turns
from control_plane.errors import ShuttingDown, Unavailable
from control_plane.framed_child.child import FramedChild
from control_plane.scheduler.types import Constraint, Vocabulary

logger = logging.getLogger(__name__)

MAX_CHILDREN = 4  # each about 100 MB for a vocabulary of 128,000 tokens
MAX_KEPT = 512  # constraints whose result is kept
MAX_WAITING = 64  # constraints of one tenant that wait to be checked

# Ends of a child for which the constraint is the cause: its CPU time is over; memory or stack are used up.
_TOO_COSTLY = {-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV}


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
        # By digest, of a constraint or of a vocabulary that cannot be used; a text says what is wrong.
        self._kept: OrderedDict[str, Constraint | str] = OrderedDict()
        self._turns = Turns(MAX_WAITING)  # one constraint at a time
        self._is_closed = False

    async def compile(self, kind: str, value: Any, vocabulary: Vocabulary, tenant: str = "") -> Constraint:
        """The constraint over this vocabulary. Raises ConstraintRefused, QueueFull or Unavailable.

        A constraint whose result is kept waits for nobody.
        """
        request = json.dumps({"kind": kind, "value": value}).encode()
        digest = hashlib.sha256(vocabulary.digest.encode() + request).hexdigest()
        found = self._find(digest, vocabulary)
        if found is None:
            async with self._turns.turn(tenant):
                found = self._find(digest, vocabulary)  # of one that was before this in the queue
                if found is None:
                    found = await self._compiled(digest, request, vocabulary)
        return found

    def _find(self, digest: str, vocabulary: Vocabulary) -> Constraint | None:
        """What is kept, if anything is. Raises ConstraintRefused."""
        known = next((each for each in (vocabulary.digest, digest) if each in self._kept), None)
        return None if known is None else self._use(known)

    def _keep(self, digest: str, result: Constraint | str) -> Constraint:
        self._kept[digest] = result
        return self._use(digest)

    def _use(self, digest: str) -> Constraint:
        self._kept.move_to_end(digest)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        found = self._kept[digest]
        if isinstance(found, str):
            raise ConstraintRefused(found)
        return found

    def child_pids(self) -> list[int]:
        """Process ids of the children that run."""
        return [child.process.pid for child in self._children.values()]

    async def close(self) -> None:
        """End every child at once."""
        self._is_closed = True
        for child in list(self._children.values()):
            await child.end()
        self._children.clear()

    async def _compiled(self, digest: str, request: bytes, vocabulary: Vocabulary) -> Constraint:
        child = await self._child(vocabulary)
        try:
            async with asyncio.timeout(self._limits.wall_limit_s):
                text, is_grammar = await child.ask(request)
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            self._children.pop(vocabulary.digest, None)
            # A child that closed its socket ends by itself: its own status says why.
            status = await child.end(is_running=isinstance(error, TimeoutError))
            logger.warning("constraint compiler ended pid=%d status=%d", child.process.pid, status)
            if (
                status not in _TOO_COSTLY
            ):  # for example killed by an operator, or because the machine has no memory left
                raise Unavailable("the process that checks constraints ended; try again") from error
            return self._keep(
                digest,
                f"takes more than {self._limits.cpu_limit_s * 1000:g} ms or "
                f"{self._limits.memory_limit_bytes >> 20} MiB to be compiled; give a simpler one",
            )
        except BaseException:
            self._children.pop(vocabulary.digest, None)
            await child.end()
            raise
        return self._keep(digest, Constraint(digest, text, vocabulary) if is_grammar else text)

    async def _child(self, vocabulary: Vocabulary) -> FramedChild:
        child = self._children.get(vocabulary.digest)
        if child is not None:
            self._children.move_to_end(vocabulary.digest)
            return child
        if self._is_closed:
            raise ShuttingDown()
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
            self._keep(vocabulary.digest, f"cannot be used with the tokenizer of this model: {text}")  # raises
        self._children[vocabulary.digest] = child
        return child
