"""`kernel`: triton.jit for functions that the host launches, in a third of the host's time.

For each launch Triton binds the arguments, describes the type of each, whether it is 1 and whether it is a multiple of
16, and looks the compiled kernel up by the text of all that. Here the first launch of a kernel generates a function
that builds a short key of the same facts, and calls what Triton compiled for it directly. Keys that are new, and
arguments out of the ordinary, go through Triton: a pointer that is not a multiple of 16, a number outside
0 to 2^31 - 1, another type than in the first launch, a tensor that is not on the current device, hooks of a profiler.

`prepare` goes further: all numbers of a launch are given once, and each launch takes the pointers alone. The layers of
a step, and most steps, have the same numbers. `prepares` keeps what an op prepared, by these numbers.

Triton's own calls are those of KNOWN_TRITON. With another version, and with its interpreter, `kernel` is triton.jit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

KNOWN_TRITON = "3.6."
# What a launch may say of the compilation, beside constants.
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
# Keys of one kernel. Far more than a server has: sizes that change in each step are not part of a key.
MAX_KEYS = 4096
MAX_PREPARED = 1024  # launches of one op. A step has at most ten; sizes that change in each step push others out

T = TypeVar("T", bound=Callable[..., Any])
Prepared = Callable[..., None]  # takes a tensor for each pointer, in the order of the kernel's parameters
_forgets: list[Callable[[], None]] = []


def kernel(function: Callable[..., None] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """triton.jit, as a decorator with or without arguments."""
    if function is None:
        return partial(kernel, do_not_specialize=do_not_specialize)
    if knobs.runtime.interpret or not triton.__version__.startswith(KNOWN_TRITON):
        return triton.jit(function, do_not_specialize=list(do_not_specialize))
    return QuickKernel(function, do_not_specialize=list(do_not_specialize))


def prepare(kernel: Any, grid: tuple[int, ...], numbers: Mapping[str, Any]) -> Prepared:
    """A launch of the kernel whose grid, numbers and OPTIONS are fixed."""
    if isinstance(kernel, QuickKernel):
        return kernel.prepare(grid, numbers)
    return by_name(kernel, grid, numbers)


def no_launch(*_pointers: Any) -> None:
    """What is prepared where there is nothing to launch."""


def by_name(kernel: Any, grid: tuple[int, ...], numbers: Mapping[str, Any]) -> Prepared:
    """`prepare` by a launch of the usual kind."""
    names = [name for name in kernel.arg_names if name not in numbers]

    def launch(*pointers: Any) -> None:
        kernel[grid](**dict(zip(names, pointers, strict=True)), **numbers)

    return launch


def prepares(function: T) -> T:
    """Keep the results of a function that prepares launches, by its arguments. These are plain data, not tensors."""
    cached: Any = lru_cache(maxsize=MAX_PREPARED)(function)
    _forgets.append(cached.cache_clear)
    return cached  # type: ignore[no-any-return]  # it takes the same arguments


def forget_prepared() -> None:
    """Prepare everything anew: for tests and benchmarks that change how kernels are launched, or with what."""
    for forget in _forgets:
        forget()


class QuickKernel(JITFunction):  # type: ignore[misc]  # triton is untyped
    """A kernel whose launches are quick."""

    def __init__(self, function: Callable[..., None], **options: Any) -> None:
        super().__init__(function, **options)
        self.num_bound_by_triton = 0  # launches
        self._entries: dict[tuple[object, ...], tuple[Callable[..., None], tuple[object, ...]]] = {}
        self._launch: Callable[..., None] = self._launch_first
        self._prepare: Callable[..., Prepared] | None = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Takes the kernel's arguments and OPTIONS, and launches it. The grid has one to three sizes."""
        return partial(self._launch, grid)

    def prepare(self, grid: tuple[int, ...], numbers: Mapping[str, Any]) -> Prepared:
        """See the module's `prepare`."""
        if self._prepare is None:
            self._prepare = _generated_prepare(self, numbers, self._scope())
        return self._prepare(grid, **numbers)

    def _launch_first(self, grid: tuple[int, ...], *positional: Any, **named: Any) -> None:
        """Generate the function for all further launches, from the types of these arguments, and call it."""
        bound = self.signature.bind(*positional, **{key: value for key, value in named.items() if key not in OPTIONS})
        bound.apply_defaults()
        self._launch = _generated(self, bound.arguments, self._scope())
        self._launch(grid, *positional, **named)

    def _scope(self) -> dict[str, Any]:
        """What a generated function reads."""
        hooks = {"enter": knobs.runtime.launch_enter_hook, "leave": knobs.runtime.launch_exit_hook}
        return {"driver": driver, "entries": self._entries, "bind": self._bind, **hooks}

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


class _Facts:
    """What a generated function reads of arguments: expressions, by what the parameters of a kernel are."""

    def __init__(self, quick: QuickKernel, pointers: Sequence[str], numbers: Mapping[str, Any]) -> None:
        """`numbers`: of those that are no pointers, values of the types that are usual."""
        params = quick.params
        integers = [param for param in params if not param.is_constexpr and type(numbers.get(param.name)) is int]
        self.addresses = "; ".join(f"{name}_at = {name}.data_ptr()" for name in pointers) or "pass"
        self.arguments = ", ".join(f"{param.name}_at" if param.name in pointers else param.name for param in params)
        self.pointer_key = ", ".join(["device", *(f"{name}.dtype" for name in pointers)])
        # -1, or whether it is a multiple of 16.
        specialised = [param.name for param in integers if not param.do_not_specialize]
        key = [f"-1 if {name} == 1 else not {name} & 15" for name in specialised]
        self.number_key = ", ".join([*key, *(param.name for param in params if param.is_constexpr), *OPTIONS])
        usual = [" == ".join(["device", *(f"{name}.get_device()" for name in pointers)])]
        usual += [f"not ({' | '.join(f'{name}_at' for name in pointers)}) & 15"] if pointers else []
        self.are_pointers_usual = " and ".join([*usual, "not enter.calls", "not leave.calls"])
        by_class: dict[type, list[str]] = {}
        for param in params:
            if param.name not in pointers:
                by_class.setdefault(type(numbers[param.name]), []).append(param.name)
        self.classes = {f"class_{index}": its_class for index, its_class in enumerate(by_class)}
        usual = [
            " is ".join([name, *(f"{each}.__class__" for each in names)])
            for name, names in zip(self.classes, by_class.values(), strict=True)
        ]
        usual += [f"not ({' | '.join(param.name for param in integers)}) >> 31"] if integers else []
        self.are_numbers_usual = " and ".join(usual) or "True"
        self.options = f"{{{', '.join(f'{option!r}: {option}' for option in OPTIONS)}}}"
        self.defaults = {f"default_{param.name}": param.default for param in params}


def _parameters(quick: QuickKernel, names: Sequence[str]) -> str:
    """These parameters, then OPTIONS."""
    params = [param for param in quick.params if param.name in names]
    given = [f"{param.name}=default_{param.name}" if param.has_default else param.name for param in params]
    return ", ".join([*given, *(f"{option}=None" for option in OPTIONS)])


def _compiled(quick: QuickKernel, source: str, name: str, scope: dict[str, Any]) -> Callable[..., Any]:
    exec(compile(source, f"<{name} of {quick.__name__}>", "exec"), scope)
    function: Callable[..., Any] = scope[name]
    return function


def _generated(quick: QuickKernel, first: Mapping[str, Any], scope: dict[str, Any]) -> Callable[..., None]:
    """The function that launches the kernel: (grid, its parameters, OPTIONS). `first`: arguments by name."""
    names = [param.name for param in quick.params]
    facts = _Facts(quick, [name for name in names if hasattr(first[name], "data_ptr")], first)
    source = f"""
def launch(grid, {_parameters(quick, names)}):
    key = entry = None
    active = driver.active
    device = active.get_current_device()
    try:
        {facts.addresses}
        if {facts.are_pointers_usual} and {facts.are_numbers_usual}:
            key = ({facts.pointer_key}, {facts.number_key},)
            entry = entries.get(key)
    except (AttributeError, TypeError):
        key = None
    if entry is None:
        return bind(key, grid, ({", ".join(names)},), {facts.options})
    run, head = entry
    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    run(x, y, z, active.get_current_stream(device), *head, {facts.arguments})
"""
    return _compiled(quick, source, "launch", scope | facts.classes | facts.defaults)


def _generated_prepare(quick: QuickKernel, first: Mapping[str, Any], scope: dict[str, Any]) -> Callable[..., Prepared]:
    """The function that prepares launches: (grid, the kernel's numbers, OPTIONS). `first`: numbers by name."""
    names = [param.name for param in quick.params]
    pointers = [param.name for param in quick.params if not param.has_default and param.name not in first]
    numbers = {param.name: first.get(param.name, param.default) for param in quick.params if param.name not in pointers}
    facts = _Facts(quick, pointers, numbers)
    source = f"""
def prepare(grid, {_parameters(quick, list(numbers))}):
    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    try:
        numbers = ({facts.number_key},) if {facts.are_numbers_usual} else None
    except TypeError:
        numbers = None
    found = {{}}

    def launch({", ".join(pointers)}):
        key = entry = None
        active = driver.active
        device = active.get_current_device()
        try:
            {facts.addresses}
            if {facts.are_pointers_usual}:
                key = ({facts.pointer_key},)
                entry = found.get(key)
        except (AttributeError, TypeError):
            key = None
        if entry is None:
            whole = None if key is None or numbers is None else (*key, *numbers)
            entry = entries.get(whole)
            if entry is None:
                return bind(whole, grid, ({", ".join(names)},), {facts.options})
            found[key] = entry
        run, head = entry
        run(x, y, z, active.get_current_stream(device), *head, {facts.arguments})

    return launch
"""
    return _compiled(quick, source, "prepare", scope | facts.classes | facts.defaults)
