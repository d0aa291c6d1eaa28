"""`kernel`: triton.jit for functions that the host launches, in a third of the host's time.

For each launch Triton binds the arguments, describes the type of each, whether it is 1 and whether it is a multiple of
16, and looks the compiled kernel up by the text of all that. Here the first launch of a kernel generates a function
that builds a short key of the same facts, and calls what Triton compiled for it directly. Keys that are new, and
arguments out of the ordinary, go through Triton: a pointer that is not a multiple of 16, a number outside
0 to 2^31 - 1, another type than in the first launch, a tensor that is not on the current device, hooks of a profiler.

Triton's own calls are those of KNOWN_TRITON. With another version, and with its interpreter, `kernel` is triton.jit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

KNOWN_TRITON = "3.6."
# What a launch may say of the compilation, beside constants.
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
# Keys of one kernel. Far more than a server has: sizes that change in each step are not part of a key.
MAX_KEYS = 4096


def kernel(function: Callable[..., None] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """triton.jit, as a decorator with or without arguments."""
    if function is None:
        return partial(kernel, do_not_specialize=do_not_specialize)
    if knobs.runtime.interpret or not triton.__version__.startswith(KNOWN_TRITON):
        return triton.jit(function, do_not_specialize=list(do_not_specialize))
    return QuickKernel(function, do_not_specialize=list(do_not_specialize))


class QuickKernel(JITFunction):  # type: ignore[misc]  # triton is untyped
    """A kernel whose launches are quick."""

    def __init__(self, function: Callable[..., None], **options: Any) -> None:
        super().__init__(function, **options)
        self.num_bound_by_triton = 0  # launches
        self._entries: dict[tuple[object, ...], tuple[Callable[..., None], tuple[object, ...]]] = {}
        self._launch: Callable[..., None] = self._launch_first

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Takes the kernel's arguments and OPTIONS, and launches it. The grid has one to three sizes."""
        return partial(self._launch, grid)

    def _launch_first(self, grid: tuple[int, ...], *positional: Any, **named: Any) -> None:
        """Generate the function for all further launches, from the types of these arguments, and call it."""
        bound = self.signature.bind(*positional, **{key: value for key, value in named.items() if key not in OPTIONS})
        bound.apply_defaults()
        scope = {"driver": driver, "entries": self._entries, "bind": self._bind}
        scope |= {"enter": knobs.runtime.launch_enter_hook, "leave": knobs.runtime.launch_exit_hook}
        self._launch = _generated(self, bound.arguments, scope)
        self._launch(grid, *positional, **named)

    def _bind(
        self,
        key: tuple[object, ...] | None,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        options: Mapping[str, Any],
    ) -> None:
        """Launch as Triton does, and keep what was launched under the key. None: the arguments have none."""
        self.num_bound_by_triton += 1
        given = {name: value for name, value in options.items() if value is not None}
        compiled = self.run(*arguments, grid=grid, warmup=False, **given)
        if key is None or compiled is None:
            return
        launcher = compiled.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return  # Triton allocates memory for each launch
        if len(self._entries) >= MAX_KEYS:
            self._entries.clear()
        # Behind the function's properties come two pointers to such memory, and behind the metadata those of hooks and
        # the hooks. There are none.
        properties = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
        self._entries[key] = (launcher.launch, (*properties, None, None, compiled.packed_metadata, None, None, None))


def _generated(quick: QuickKernel, first: Mapping[str, Any], scope: dict[str, Any]) -> Callable[..., None]:
    """The function that launches the kernel: (grid, its parameters, OPTIONS). `first`: arguments by name."""
    names = [param.name for param in quick.params]
    pointers = [name for name in names if hasattr(first[name], "data_ptr")]
    integers = [param for param in quick.params if not param.is_constexpr and type(first[param.name]) is int]
    key = ["device", *(f"{name}.dtype" for name in pointers)]
    # -1, or whether it is a multiple of 16.
    specialised = [param.name for param in integers if not param.do_not_specialize]
    key += [f"-1 if {name} == 1 else not {name} & 15" for name in specialised]
    key += [param.name for param in quick.params if param.is_constexpr]
    key += OPTIONS
    by_class: dict[type, list[str]] = {}
    for name in names:
        if name not in pointers:
            by_class.setdefault(type(first[name]), []).append(name)
    is_usual = [" == ".join(["device", *(f"{name}.get_device()" for name in pointers)])]
    is_usual += [f"not ({' | '.join(f'{name}_at' for name in pointers)}) & 15"] if pointers else []
    is_usual += [f"not ({' | '.join(param.name for param in integers)}) >> 31"] if integers else []
    for index, (its_class, its_names) in enumerate(by_class.items()):
        is_usual.append(" is ".join([f"class_{index}", *(f"{name}.__class__" for name in its_names)]))
        scope[f"class_{index}"] = its_class
    is_usual += ["not enter.calls", "not leave.calls"]
    parameters = []
    for param in quick.params:
        parameters.append(f"{param.name}=default_{param.name}" if param.has_default else param.name)
        scope[f"default_{param.name}"] = param.default
    addresses = [f"{name}_at" if name in pointers else name for name in names]
    source = f"""
def launch(grid, {", ".join(parameters)}, {", ".join(f"{option}=None" for option in OPTIONS)}):
    key = entry = None
    active = driver.active
    device = active.get_current_device()
    try:
        {"; ".join(f"{name}_at = {name}.data_ptr()" for name in pointers) or "pass"}
        if {" and ".join(f"({condition})" for condition in is_usual)}:
            key = ({", ".join(key)},)
            entry = entries.get(key)
    except (AttributeError, TypeError):
        key = None
    if entry is None:
        return bind(key, grid, ({", ".join(names)},), {{{", ".join(f"'{option}': {option}" for option in OPTIONS)}}})
    run, head = entry
    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    run(x, y, z, active.get_current_stream(device), *head, {", ".join(addresses)})
"""
    exec(compile(source, f"<launch of {quick.__name__}>", "exec"), scope)
    launch: Callable[..., None] = scope["launch"]
    return launch
