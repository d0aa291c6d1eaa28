"""Which modules of the served model a row's module id means.

The workers' reports decide, as for PEFT's files; before a worker reported, the checkpoint's headers.
"""

from __future__ import annotations

from motet.lora_module_ids import CROSS_ATTENTION, GATE_UP, MODULES, LoraModule, paths_of

from contract.expert_names import ANY, DOWN, GATE, UP, of_expert
from control_plane.registry.peft.safetensors_header import CHECK_BASE, refuse
from control_plane.registry.peft.target_modules import TargetModules, layer_of

_EXPERTS = {13: GATE, 14: DOWN, 15: UP}


class RowModules:
    """The modules of one base model by layer and by their paths after the layer's index."""

    def __init__(self, targets: TargetModules) -> None:
        self._targets = targets
        self._layers: dict[int, dict[str, str]] = {}  # layer -> path after its index -> whole path
        for name in targets.reported or targets.served:
            layer = layer_of(name)
            if layer is not None:
                path = name.split(f".{layer}.", 1)[-1]
                self._layers.setdefault(layer, {})[path] = name

    @property
    def num_layers(self) -> int:
        """One more than the index of the last decoder layer."""
        return max(self._layers, default=-1) + 1

    def names(self, module: LoraModule, layer: int) -> tuple[str, ...]:
        """Paths of the modules that have the outputs of a row, in the row's order. Raises InvalidAdapter."""
        field = f"module id {module}"
        if module.module_id in CROSS_ATTENTION:
            raise refuse(field, "the base model has no cross attention; only a model with an encoder takes such rows")
        if module.module_id in _EXPERTS:
            return self._experts(module, layer, field)
        known = self._layers.get(layer, {})
        names = tuple(known[path] for path in paths_of(module, known))
        if not names:
            raise refuse(field, f"the base model has no such module in layer {layer}{_hint(module)}; {CHECK_BASE}")
        for name in names:
            if name not in self._targets.served:
                raise refuse(field, self._targets.refusal(name))
        return names

    def _experts(self, module: LoraModule, layer: int, field: str) -> tuple[str, ...]:
        end = f".experts.{ANY}.{_EXPERTS[module.module_id]}"
        for name, served in self._targets.experts.items():
            if layer_of(name) == layer and name.endswith(end):
                return tuple(of_expert(name, expert) for expert in range(served.num_experts))
        refused = [name for name in self._layers.get(layer, {}).values() if name.endswith(end)]
        if refused:
            raise refuse(field, self._targets.refusal(refused[0]))
        raise refuse(field, f"layer {layer} of the base model has no experts that take adapters; {CHECK_BASE}")


def has_own_a(module: LoraModule) -> bool:
    """Whether each module of a row has an A of its own; else they share one."""
    return module.module_id in _EXPERTS


def is_swapped(name: str) -> bool:
    """Whether a row has the second half of a module's outputs first."""
    return name.endswith(GATE_UP)


def _hint(module: LoraModule) -> str:
    """What else a row's id may have been meant for."""
    names = [MODULES[half].name for half in module.halves]
    if names:
        return f", neither as one linear nor as {', '.join(names)}"
    if module.module_id in (1, 2, 3):
        return " as a linear of its own; where query, key and value are one linear, rows have the id 0"
    return ""
