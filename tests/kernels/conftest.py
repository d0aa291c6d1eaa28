"""Where the kernels' tests run: on the GPU if there is one, else on the CPU with Triton's interpreter.

Tests of Triton kernels are in files test_triton_*.py and put their tensors on the fixture `device`.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.native import find_compiler

collect_ignore_glob: list[str] = []
HAS_TRITON = importlib.util.find_spec("triton") is not None
# triton is not made for every platform. Where `make` installs it, its absence is an error.
if not HAS_TRITON and (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    collect_ignore_glob += ["*/test_triton_*.py"]
# So is a C compiler not everywhere. Without one, and only then, native code's tests are left out.
if find_compiler() is None:
    collect_ignore_glob += ["*test_native_*.py", "*/test_triton_host_time.py"]  # Triton compiles its launchers


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device whose kernels are tested."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def mend_interpreter() -> None:
    """Mend what the interpreter of Triton 3.6 gets wrong.

    `range(0, n)` of an n known at run time takes int() of an array with one element, which NumPy 2.4 refuses.
    float32 is cut off to bfloat16 instead of rounded, and `tl.dot` takes the bits of bfloat16 for integers. Casts to
    float8e4nv lose carries and turn large numbers into NaN; a GPU rounds to even and saturates. `tl.dot` sums in an
    order that depends on the BLAS and on a row's place in its tile; summed in float64 and rounded once, it does not.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    patch_tensor, convert_float = interpreter._patch_lang_tensor, interpreter._convert_float
    builder = interpreter.InterpreterBuilder
    create_dot = builder.create_dot

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def convert_and_round(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        tensor = torch.from_numpy(np.ascontiguousarray(data)).reshape(data.shape)
        if (source, target) == (tl.float32, tl.bfloat16):
            return tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        if (source, target) == (tl.bfloat16, tl.float32):
            return (data.astype(np.uint32) << 16).view(np.float32)
        if source == tl.float8e4nv:
            tensor = tensor.view(torch.float8_e4m3fn)
            if target == tl.bfloat16:
                return tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
            return tensor.to(torch.float16 if target == tl.float16 else torch.float32).numpy()
        if target == tl.float8e4nv:
            tensor = tensor.view(torch.bfloat16) if source == tl.bfloat16 else tensor
            return tensor.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert_float(data, source, target, rounding)

    def widen(handle: Any) -> Any:
        data = handle.data
        if handle.dtype.scalar == tl.bfloat16:
            data = convert_and_round(data, tl.bfloat16, tl.float32, None)
        return interpreter.TensorHandle(data.astype(np.float64), tl.float64) if data.dtype.kind == "f" else handle

    def dot_of_floats(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        wide = create_dot(self, widen(a), widen(b), widen(d), *rest)
        return interpreter.TensorHandle(wide.data.astype(d.data.dtype), d.dtype.scalar)

    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter._convert_float = convert_and_round
    builder.create_dot = dot_of_floats


def patch_once_per_launch() -> None:
    """Have the interpreter patch the language once per launch, not in every call of a helper: most of its time."""
    from triton import language as tl
    from triton.runtime import interpreter

    patch_lang, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    patched: set[int] = set()  # ids of the modules patched since the launch began

    def patch_what_is_not(fn: Any) -> Any:
        modules = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if modules and modules <= patched:
            return interpreter._LangPatchScope()
        patched.update(modules)
        return patch_lang(fn)

    def restore_and_forget(self: Any) -> None:
        patched.clear()
        restore(self)

    interpreter._patch_lang = patch_what_is_not
    interpreter._LangPatchScope.restore = restore_and_forget


def quicken_interpreter() -> None:
    """Have the interpreter do less for each operation, which halves its time.

    A type of blocks is made once, with the shape that it shares with all types of that shape, so that operands of one
    shape are not compared dimension by dimension. The shape of a tensor, as the language has it, and NumPy's type for a
    type are computed once and kept. The interpreter also computes whether integers overflow, for an assertion that it
    makes only with `debug`. `debug` is off, so the computation is turned off as well.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    init_block, broadcast = core.block_type.__init__, TritonSemantic.broadcast_impl_value
    blocks: dict[tuple[str, int | None, tuple[int, ...]], Any] = {}  # by element type, its address space, and shape
    block_shapes: dict[tuple[int, ...], Any] = {}

    def known_block(cls: Any, element_ty: Any, shape: Any) -> Any:
        sizes = tuple(core._unwrap_if_constexpr(size) for size in shape)
        key = element_ty.name, getattr(element_ty, "address_space", None), sizes
        if key not in blocks:
            blocks[key] = object.__new__(cls)
        return blocks[key]

    def init_block_once(self: Any, element_ty: Any, shape: Any) -> None:
        if not hasattr(self, "name"):  # what is set last: a shape that was refused is refused again
            init_block(self, element_ty, shape)
            self.shape = block_shapes.setdefault(tuple(self.shape), self.shape)

    def broadcast_of_known_shapes(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    core.block_type.__new__ = known_block
    core.block_type.__init__ = init_block_once
    TritonSemantic.broadcast_impl_value = broadcast_of_known_shapes

    init, get_np_dtype = core.tensor.__init__, interpreter._get_np_dtype
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    np_dtypes: dict[str, Any] = {}

    def init_of_known_shape(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in shapes:
            init(self, handle, type)
            shapes[shape] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[shape]

    def known_np_dtype(type: Any) -> Any:
        name = type.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = get_np_dtype(type)
        return np_dtypes[name]

    core.tensor.__init__ = init_of_known_shape
    interpreter._get_np_dtype = known_np_dtype
    options = interpreter.interpreter_builder.options
    assert not options.debug, "overflow of integers is asserted"
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


if os.environ.get("TRITON_INTERPRET") == "1" and HAS_TRITON:
    mend_interpreter()
    patch_once_per_launch()
    quicken_interpreter()


@pytest.fixture(autouse=True)
def _launches_of_this_test() -> Iterator[None]:
    """What a test replaces is prepared in it, and not kept."""
    if not HAS_TRITON:
        yield
        return
    from kernels.triton_launch import forget_prepared

    forget_prepared()
    yield
    forget_prepared()
