"""The toolkit for kernels: how they are compiled (for fixed types, into numba's cache), and their arguments.

A `kernel` is compiled when it is defined, and numba compiles what it calls into it once more. An `outlined` one is
compiled when it is first needed, and others call it by its address: whoever drives many of them is compiled quickly.
Arrays that belong together travel as a NamedTuple, a bundle. numba does not convert what is inside of one, so its
types must match exactly: arrays that a kernel only reads are passed through `frozen` first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.runtime.nrt import rtsys
from numba.extending import intrinsic
from numpy.typing import NDArray

INT, FLOAT = types.int64, types.float64
PAIR = types.UniTuple(FLOAT, 2)  # type: ignore[no-untyped-call]
#: Sums may be reordered and products fused; infinities and NaN mean what they always do.
NUMERICS = {"contract", "reassoc", "nsz", "arcp"}
_LOCK = RLock()
_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": NUMERICS, "error_model": "numpy"}


def readable(dtype: Any, ndim: int) -> Any:
    """The type of C-ordered arrays that are only read, so that read-only ones pass too."""
    return types.Array(dtype, ndim, "C", readonly=True)


def writable(dtype: Any, ndim: int) -> Any:
    """The type of C-ordered arrays that are written to."""
    return types.Array(dtype, ndim, "C")


def bundle(cls: type, *fields: Any) -> Any:
    """The type of a NamedTuple whose fields have these types."""
    if len(set(fields)) == 1:
        return types.NamedUniTuple(fields[0], len(fields), cls)  # type: ignore[no-untyped-call]
    return types.NamedTuple(fields, cls)  # type: ignore[no-untyped-call]


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """A C-ordered, read-only view of an array (or a copy where it is not C-ordered), for `readable` fields."""
    flags = array.flags
    if flags.c_contiguous and not flags.writeable:
        return array
    view = array.view() if flags.c_contiguous else np.ascontiguousarray(array)
    view.setflags(write=False)
    return view


@cache
def nothing(*shape: int, dtype: type = np.float64) -> NDArray[Any]:
    """A read-only array without entries, for fields of bundles that are not needed."""
    return frozen(np.empty(shape, dtype=dtype))


#: Compile a function as a part of the kernels that call it.
part: Callable[[Callable[..., Any]], Callable[..., Any]] = njit(**_OPTIONS)


def kernel(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function for these types when it is defined: nothing is compiled later, during a fit."""

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        # blocks of neighbouring coordinates become vector instructions only with this pass, which numba leaves off
        with _compiling(SLP_VECTORIZE=1):
            return _compiled(function, result(*arguments))  # type: ignore[no-any-return]

    return compiled


class _Cache(FunctionCache):
    """numba's cache, from which kernels are loaded at once: numba would first import all that it can compile."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)  # loaded kernels call it
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]


def _compiled(function: Callable[..., Any], signature: Any, inner: bool = False) -> Any:
    """A function compiled for these types, or loaded from the cache; an ``inner`` one for other kernels only."""
    made: Any
    if inner:
        made = CFunc(function, (signature.args, signature.return_type), {}, _OPTIONS)
        made._cache = _Cache(function)  # type: ignore[no-untyped-call]
        made.compile()
        return made
    made = njit(**_OPTIONS)(function)
    made._cache = _Cache(function)  # type: ignore[no-untyped-call]
    made.compile(signature)
    made.disable_compile()
    return made


@contextmanager
def _compiling(**options: int) -> Iterator[None]:
    """numba's options of compilation, which it does not take function by function."""
    with _LOCK:
        before = {name: getattr(config, name) for name in options}
        try:
            for name, value in options.items():
                setattr(config, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(config, name, value)


class Outlined:
    """A kernel that is compiled, or loaded from numba's cache, when it is first called or asked for its address.

    ``at(address, (argument, ...))`` calls it from other kernels. Types must match; numbers and read-only arrays are
    converted. Who calls it from Python sees to that: numba takes longer to compare the types of all that is in bundles
    than a small problem takes, so it does that only where `fedkin.solvers.kernels.CHECKED` says so.
    """

    def __init__(self, function: Callable[..., Any], signature: Any, *, quickly: bool, inner: bool) -> None:
        self.__doc__, self.name = function.__doc__, function.__name__
        self.at = _call(signature.return_type, signature.args)
        self._function, self._signature, self._quickly, self._inner = function, signature, quickly, inner
        self._compiled: Any = None
        self._address: int | None = None
        self._run: Callable[..., Any] = self._first_call

    def __call__(self, *arguments: Any) -> Any:
        return self._run(*arguments)

    def _first_call(self, *arguments: Any) -> Any:
        compiled = self.load()
        self._run = compiled.overloads[self._signature.args].entry_point
        return self._run(*arguments)

    def load(self) -> Any:
        """Compile it now, if that is not done."""
        level: Any = type(config.OPT)(1)  # type: ignore[attr-defined]
        options = {"OPT": level, "LOOP_VECTORIZE": 0} if self._quickly else {"SLP_VECTORIZE": 1}
        with _compiling(**options):
            if self._compiled is None:
                self._compiled = _compiled(self._function, self._signature, self._inner)
        return self._compiled

    @property
    def address(self) -> int:
        """Where its machine code is in this process."""
        if self._address is None:
            compiled = self.load()
            if self._inner:
                self._address = int(compiled.address)
            else:
                found = compiled.overloads[self._signature.args]
                self._address = int(found.library.get_pointer_to_function(found.fndesc.llvm_cfunc_wrapper_name))
        return self._address


def outlined(
    result: Any, *arguments: Any, quickly: bool = False, inner: bool = False
) -> Callable[[Callable[..., Any]], Outlined]:
    """Compile a function for these types when it is needed.

    ``quickly``, with little effort to make it fast: it only drives others, or takes little time. An ``inner`` one is
    called by other kernels only.
    """
    return lambda function: Outlined(function, result(*arguments), quickly=quickly, inner=inner)


def _call(result: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """``call(address, arguments)`` in kernels."""

    @intrinsic
    def call(_: Any, address: Any, given_as: Any) -> Any:
        def generated(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            value_type = context.get_value_type
            kind = ir.FunctionType(value_type(result), [value_type(one) for one in arguments])
            function = builder.inttoptr(values[0], kind.as_pointer())
            given = cgutils.unpack_tuple(builder, values[1])  # type: ignore[no-untyped-call]
            found = builder.call(function, given)
            return context.get_dummy_value() if result == types.void else found

        return result(INT, types.Tuple(arguments)), generated  # type: ignore[no-untyped-call]

    return call


def entries(pattern: str, folder: Path) -> Iterator[Path]:
    """Index files with such names in the places where numba keeps them."""
    pattern += ".nbi"
    yield from (folder / "__pycache__").glob(pattern)
    for place in (os.environ.get("NUMBA_CACHE_DIR"), Path.home() / ".cache" / "numba"):
        if place and Path(place).is_dir():
            yield from Path(place).glob(f"{folder.name}_*/{pattern}")
