"""The adapter arena: loads packed adapters into slots and evicts them. `step.AdapterSteps` applies them.

Loader threads call `load`; everything else belongs to the compute thread. A load writes pages that no step reads, and
publishes the adapter in one assignment at its end, so that a step sees all of an adapter or nothing. On a GPU a load
copies beside the steps, but behind those that may still read an evicted adapter's pages (transfers.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from data_plane.adapters.arena.module_groups import ModuleGroups
from data_plane.adapters.arena.pages import PagePool
from data_plane.adapters.arena.placement import Placement, place
from data_plane.adapters.arena.rotary import Rotary, RotaryTables
from data_plane.adapters.arena.slots import Columns, Load, ModulePages, ResidentAdapter, SlotTable, TablesThere
from data_plane.adapters.arena.transfers import Transfers
from data_plane.adapters.arena.writing import AdapterWriter
from data_plane.adapters.format.manifest import Manifest, read_manifest
from data_plane.adapters.format.packed import TORCH_DTYPES
from data_plane.adapters.kinds.base_weights import BaseWeights
from data_plane.errors import AdapterLoadError, AdapterMismatch, ArenaFull, PlanRefused, StaleSlot
from data_plane.plan import AdapterSource, NewRow, TargetKind, TargetModule
from kernels.lora import VECTOR_TABLES, Epilogue, ModuleGroup, PagedModule

logger = logging.getLogger(__name__)

NOT_READY = -1


class AdapterArena:
    """Slots over a byte budget (data_plane.plan.AdapterSlots)."""

    def __init__(
        self,
        targets: Sequence[TargetModule],
        *,
        num_slots: int,
        arena_bytes: int,
        dtype: torch.dtype,
        device: torch.device | str,
        base: BaseWeights,
        base_fingerprint: str,
        rotary: Rotary | None = None,
        num_scaled: int = 0,
        hidden_width: int = 0,
    ) -> None:
        """`rotary`: None if the model has none that adapters may scale.

        num_scaled: pairs of an adapter and a scale that rows may use at once. hidden_width: what score heads read.
        """
        if not targets:
            raise ValueError("target modules is empty: the model has no linear that adapters may target")
        if num_slots < 1 or arena_bytes < 0:
            raise ValueError(f"num_slots is {num_slots} and arena_bytes {arena_bytes}, want at least 1 and 0")
        self._targets = {target.name: target for target in targets}
        self._num_slots = num_slots
        self._dtype = dtype
        self._device = torch.device(device)
        self._base_fingerprint = base_fingerprint
        self._rotary = rotary
        self._hidden_width = hidden_width
        self._pool = PagePool(targets, arena_bytes, dtype, self._device)
        self.table = SlotTable(targets, num_slots, self._pool, num_scaled)
        self.groups = ModuleGroups(targets, self.table, base)
        self._transfers = Transfers(self._device)
        self._writer = AdapterWriter(self._pool, base, self.table.rows.vocab_size, self._transfers)
        # Guards the pool's free list, _loads, _ready, _generations and unlisted.
        self._lock = threading.Lock()
        # Invariant: a slot is in at most one of _loads and _ready; in neither, it is empty.
        self._loads: dict[int, Load] = {}
        self._ready: dict[int, ResidentAdapter] = {}
        self._generations = np.full(num_slots, NOT_READY)  # int64, of what is in _ready
        self.unlisted: list[ResidentAdapter] = []  # published, not yet in the slot table
        self._reserved: dict[Load, npt.NDArray[np.int64]] = {}  # pages of loads, cancelled ones included

    @property
    def least_adapter_bytes(self) -> int:
        """What the smallest adapter takes: rank 1 on one target module."""
        return min(self._module_bytes(target, 1) for target in self._targets.values())

    def adapter_bytes(self, rank: int) -> int:
        """What an adapter of `rank` on every linear of the decoder layers takes."""
        return sum(
            self._module_bytes(target, rank) for target in self._targets.values() if target.kind is TargetKind.LINEAR
        )

    def _module_bytes(self, target: TargetModule, rank: int) -> int:
        num_pages = sum(self._pool.num_pages_of(rank, width) for width in (target.in_features, target.out_features))
        return num_pages * self._pool.page_bytes

    # ---- loader threads ----

    def load(self, slot: int, generation: int, digest: str, source: AdapterSource) -> None:
        """Fill an empty slot (see AdapterSlots). Returns when plans may name it.

        A load that is cancelled by `evict` or `clear` raises AdapterLoadError and gives its pages back.
        """
        load = self._begin(slot, generation, digest)
        try:
            data, chunks = source.open(digest)
            manifest = read_manifest(data, digest)
            placement = self._plan(manifest)
            rotation = self._rotation(manifest)
            page_ids = self._reserve(load, placement.num_pages)
            with self._transfers.load():
                self._pool.zero(page_ids[placement.num_matrix_pages :])  # all others are written as a whole
                size_bytes = self._writer.write(load, manifest, chunks, placement, page_ids)
                columns = self.table.columns(placement.modules)
                there = self.table.upload(page_ids, columns)
            self._publish(load, page_ids, columns, there, placement, size_bytes, rotation, manifest.num_tokens)
        except BaseException as error:
            self._abandon(load)
            if isinstance(error, AdapterLoadError) or not isinstance(error, Exception):
                raise
            raise AdapterLoadError(f"adapter {digest}: {type(error).__name__} while loading: {error}") from error
        logger.info("adapter ready slot=%d generation=%d digest=%s pages=%d", slot, generation, digest, len(page_ids))

    def load_zeros(
        self, slot: int, generation: int, rank: int, *, has_vectors: bool = False, is_trained: bool = False
    ) -> None:
        """Fill an empty slot with an adapter for warm-up: this rank on every target module, and it adds nothing.

        All modules share the same pages, so that the adapter takes no more than its largest module. With has_vectors
        every module also has each kind of vector, all of them ones that share pages as well. With is_trained steps read
        as much as of a usual trained adapter: the linears of the layers alone, each with pages of its own. Raises
        ArenaFull.
        """
        targets = [target for target in self._targets.values() if not is_trained or target.kind is TargetKind.LINEAR]
        vectors = dict.fromkeys(VECTOR_TABLES, 0) if has_vectors else {}
        num_values = max(target.out_features for target in targets) if has_vectors else 0
        load = self._begin(slot, generation, f"zeros of rank {rank}")
        try:
            modules, first = {}, 0
            for target in targets:
                a, b = (self._pool.num_pages_of(rank, width) for width in (target.in_features, target.out_features))
                modules[target.name] = ModulePages(rank, 0.0, first, a, b, vectors)
                first += a + b if is_trained else 0
            num_pages = max(entry.first + entry.num_a_pages + entry.num_b_pages for entry in modules.values())
            page_ids = self._reserve(load, num_pages + -(-num_values // self._pool.values_per_page))
            with self._transfers.load():
                self._pool.zero(page_ids)
                if has_vectors:
                    self._pool.write_values(page_ids[num_pages:], torch.ones(num_values), self._transfers.ring)
                placement = Placement(modules, num_values, num_pages, len(page_ids))
                columns = self.table.columns(placement.modules)
                there = self.table.upload(page_ids, columns)
            self._publish(load, page_ids, columns, there, placement, len(page_ids) * self._pool.page_bytes)
        except BaseException:
            self._abandon(load)
            raise

    def _begin(self, slot: int, generation: int, digest: str) -> Load:
        if not 0 <= slot < self._num_slots:
            raise AdapterLoadError(f"slot {slot} is not one of the {self._num_slots} slots")
        load = Load(slot, generation, digest)
        with self._lock:
            if slot in self._loads or slot in self._ready:
                raise AdapterLoadError(f"slot {slot} is not empty; evict what it holds first")
            self._loads[slot] = load
        return load

    def _plan(self, manifest: Manifest) -> Placement:
        """Check the manifest against this worker, and place its modules."""
        where = f"adapter {manifest.digest}"
        if manifest.base_fingerprint != self._base_fingerprint:
            raise AdapterMismatch(
                f"{where}: base_fingerprint is {manifest.base_fingerprint}, this worker serves {self._base_fingerprint}"
            )
        if TORCH_DTYPES[manifest.dtype] != self._dtype:
            raise AdapterMismatch(f"{where}: dtype is {manifest.dtype}, this worker serves {self._dtype}")
        if manifest.head is not None and manifest.head.in_features != self._hidden_width:
            raise AdapterMismatch(
                f"{where}: its score head reads {manifest.head.in_features} values, the model's last hidden state has "
                f"{self._hidden_width or 'none that can be read'}"
            )
        return place(manifest, self._targets, self._pool)

    def _rotation(self, manifest: Manifest) -> RotaryTables | None:
        """Tables of its own that the adapter was trained with."""
        if manifest.rope is None:
            return None
        where = f"adapter {manifest.digest}: it has a rotary embedding of its own"
        if self._rotary is None:
            raise AdapterMismatch(f"{where}, and this model has none that could be scaled")
        try:
            return self._rotary.scaled(manifest.rope)
        except ValueError as error:
            raise AdapterMismatch(f"{where}: {error}") from error

    def _reserve(self, load: Load, num_pages: int) -> npt.NDArray[np.int64]:
        with self._lock:
            page_ids = self._pool.take(num_pages)
            if page_ids is None:
                needed, free = num_pages * self._pool.page_bytes, self._pool.num_free * self._pool.page_bytes
                raise ArenaFull(
                    f"adapter {load.digest} needs {needed} bytes, {free} of the arena are free; "
                    "evict another or raise --arena-bytes"
                )
            self._reserved[load] = page_ids
        return page_ids

    def _publish(
        self,
        load: Load,
        page_ids: npt.NDArray[np.int64],
        columns: Columns,
        there: TablesThere,
        placement: Placement,
        size_bytes: int,
        rotation: RotaryTables | None = None,
        num_tokens: int | None = None,
    ) -> None:
        adapter = ResidentAdapter(
            load.slot,
            load.generation,
            load.digest,
            page_ids,
            columns,
            there,
            placement.num_matrix_pages,
            placement.head,
            size_bytes,
            rotation,
            placement.rows,
            num_tokens,
        )
        with self._lock:
            if load.is_cancelled:
                raise AdapterLoadError(f"adapter {load.digest}: the load of slot {load.slot} was cancelled")
            del self._loads[load.slot]
            del self._reserved[load]
            self._ready[load.slot] = adapter
            self._generations[load.slot] = adapter.generation
            self.unlisted.append(adapter)

    def _abandon(self, load: Load) -> None:
        with self._lock:
            page_ids = self._reserved.pop(load, None)
            if page_ids is not None:
                self._pool.give_back(page_ids)
            if self._loads.get(load.slot) is load:
                del self._loads[load.slot]

    # ---- compute thread ----

    def check(self, slot: int, generation: int) -> None:
        """Raise StaleSlot unless the slot is ready with this generation."""
        adapter = self._ready.get(slot)
        if adapter is None or adapter.generation != generation:
            holds = "is not ready" if adapter is None else f"holds generation {adapter.generation}"
            raise StaleSlot(f"slot {slot} {holds}, the plan names generation {generation}")

    def check_row(self, new: NewRow) -> None:
        """Raise PlanRefused unless the adapters of a new row are ready and may be combined as the row names them."""
        if new.slot is None:
            return
        named = [(new.slot, new.slot_generation)]
        if new.adapters is not None:
            named += [(member.slot, member.generation) for member in new.adapters.members]
            self.list_published()
        for slot, generation in named:
            if not 0 <= slot < self.table.num_slots:
                raise PlanRefused(f"new row {new.row} names slot {slot} of {self.table.num_slots}")
            self.check(slot, generation)
            if new.adapters is not None and self.replaces_rows(slot):
                raise PlanRefused(f"new row {new.row} combines or scales slot {slot}, whose adapter replaces rows")

    def num_tokens(self, slot: int) -> int | None:
        """Tokens of the vocabulary of the adapter in a slot that is ready; None: the base model's."""
        return self._ready[slot].num_tokens

    def replaces_rows(self, slot: int) -> bool:
        """Whether the adapter in a slot that is ready has rows or a vocabulary of its own."""
        adapter = self._ready[slot]
        return bool(adapter.rows) or adapter.num_tokens is not None

    def check_all(self, slots: npt.NDArray[np.int32], generations: npt.NDArray[np.int64]) -> None:
        """`check` for each of the slots [n] that is not -1."""
        is_stale = (slots >= 0) & (self._generations[slots] != generations)
        if is_stale.any():
            at = int(is_stale.argmax())
            self.check(int(slots[at]), int(generations[at]))

    def check_ready(self, slots: npt.NDArray[np.intp]) -> None:
        """Raise StaleSlot unless each of the slots [n] is ready."""
        is_ready = self._generations[slots] != NOT_READY
        if not is_ready.all():
            raise StaleSlot(f"slot {slots[is_ready.argmin()]} is not ready")

    def evict(self, slot: int, generation: int) -> None:
        """Empty the slot, or cancel its load (see AdapterSlots)."""
        with self._lock:
            load = self._loads.get(slot)
            if load is not None and load.generation == generation:
                load.is_cancelled = True
                del self._loads[slot]
                return
            self.check(slot, generation)
            self._remove(self._ready.pop(slot))
        logger.info("adapter evicted slot=%d generation=%d", slot, generation)

    def _remove(self, adapter: ResidentAdapter) -> None:
        self._transfers.note_freed(*adapter.there.all)
        self._generations[adapter.slot] = NOT_READY
        self._pool.give_back(adapter.page_ids)
        if adapter in self.unlisted:
            self.unlisted.remove(adapter)
        self.table.remove(adapter.slot)

    def used_bytes(self) -> int:
        """Bytes of the arena in use, those of loads in progress included."""
        return self._pool.num_used * self._pool.page_bytes

    def clear(self) -> None:
        """Empty every slot and cancel every load."""
        with self._lock:
            for load in self._loads.values():
                load.is_cancelled = True
            self._loads.clear()
            for adapter in self._ready.values():
                self._remove(adapter)
            self._ready.clear()

    def module_groups(self, names: tuple[str, ...]) -> list[tuple[ModuleGroup, Epilogue]]:
        """The named modules, which read one input and write side by side, as groups of neighbours in the slot table.

        The groups' tensors stay the same for the life of the arena, so that a program recorded with them sees every
        load.
        """
        return [(group.modules, group.epilogue) for group in self.groups.of(names)]

    def paged_module(self, name: str) -> PagedModule:
        """One module's weights in the arena, for all slots. Valid until the next load, evict or clear."""
        if self.unlisted:
            self.list_published()
        return self.table.group([self._targets[name]])[0].module(0)

    def list_published(self) -> None:
        """Enter the adapters that became ready since the last call into the slot table."""
        with self._lock:
            for adapter in self.unlisted:
                self.table.put(adapter)
            self.unlisted.clear()

    def num_labels(self, slot: int) -> int:
        """Labels of the score head of the adapter in a slot that is ready; 0: it has none."""
        head = self._ready[slot].head
        return 0 if head is None else head.size.num_labels

    def score(self, slot: int, state: torch.Tensor) -> torch.Tensor:
        """float32 logits [num_labels] of the score head of the adapter in a slot, of a hidden state float32 [width]."""
        adapter = self._ready[slot]
        assert adapter.head is not None, f"slot {slot} has no score head"
        return adapter.head.logits(self._pool, adapter.there.page_ids[adapter.first_vector_page :], state)

    def page_ids(self, slot: int) -> npt.NDArray[np.int64]:
        """The pages of the adapter in a slot that is ready."""
        return self._ready[slot].page_ids

    def check_invariants(self) -> None:
        """Assert that pages and slots balance."""
        with self._lock:
            held = [adapter.page_ids for adapter in self._ready.values()] + list(self._reserved.values())
            self._pool.check(held)
            assert not self._loads.keys() & self._ready.keys(), "a slot is loading and ready"
            assert all(slot == adapter.slot for slot, adapter in self._ready.items()), "an adapter is in a wrong slot"
