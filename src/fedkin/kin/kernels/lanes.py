"""Eight numbers in one vector register, for kernels: read, written and computed with together.

Compilers turn loops over lanes into vector instructions here and there; this says it. A group is in each lane, so that
eight of them are reduced in the time of one. Machines with narrower registers take two or four for a vector.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function as insert_function
from numba.core.typing.templates import ConcreteTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, models, register_model

from fedkin.kin.kernels.bundles import LANES

#: A function of kernels that writes its own instructions.
_inside: Callable[[Callable[..., Any]], Any] = intrinsic
_VECTOR = ir.VectorType(ir.DoubleType(), LANES)


class _Lanes(types.Type):
    """The type of such a vector, inside kernels only."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


@register_model(_Lanes)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)  # type: ignore[no-untyped-call]


_LANES = _Lanes()


def _place(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    """A pointer to the vector with this number in a C-ordered array."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(builder.bitcast(data, _VECTOR.as_pointer()), [at])


@_inside
def lanes(_: Any, array: Any, at: Any) -> Any:
    """The vector with number ``at`` of those that make up an array ``(..., LANES)``."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place = _place(context, builder, signature.args[0], *given)
        return builder.load(place, align=8)

    return _LANES(array, types.intp), emit


@_inside
def put(_: Any, array: Any, at: Any, value: Any) -> Any:
    """Write a vector where `lanes` reads one."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        builder.store(given[2], _place(context, builder, signature.args[0], *given[:2]), align=8)
        return context.get_dummy_value()

    return types.void(array, types.intp, _LANES), emit


@_inside
def every(_: Any, value: Any) -> Any:
    """A number in all lanes."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return _spread(builder, given[0])

    return _LANES(types.float64), emit


@_inside
def at_least(_: Any, value: Any, least: Any) -> Any:
    """The larger of a vector and a number in each lane."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        others = _spread(builder, given[1])
        return builder.select(builder.fcmp_ordered(">", given[0], others), given[0], others)

    return _LANES(_LANES, types.float64), emit


@_inside
def square_root(_: Any, value: Any) -> Any:
    """Of every lane."""

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kind = ir.FunctionType(_VECTOR, [_VECTOR])
        root = insert_function(builder.module, kind, f"llvm.sqrt.v{LANES}f64")  # type: ignore[no-untyped-call]
        return builder.call(root, given)

    return _LANES(_LANES), emit


def _spread(builder: Any, number: Any) -> Any:
    zero = ir.Constant(ir.IntType(32), 0)
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, zero)
    every_one = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(_VECTOR, ir.Undefined), every_one)


def _arithmetic(sign: Callable[[Any, Any], Any], instruction: str) -> None:
    """Let vectors be added and so on; a product that is then added may be rounded once."""

    @infer_global(sign)  # type: ignore[no-untyped-call]
    class Kinds(ConcreteTemplate):
        cases = (_LANES(_LANES, _LANES),)

    @lower_builtin(sign, _Lanes, _Lanes)  # type: ignore[no-untyped-call, untyped-decorator]
    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return getattr(builder, instruction)(*given, flags=("contract", "nsz"))


for _sign, _instruction in {"add": "fadd", "sub": "fsub", "mul": "fmul", "truediv": "fdiv"}.items():
    _arithmetic(getattr(operator, _sign), _instruction)
