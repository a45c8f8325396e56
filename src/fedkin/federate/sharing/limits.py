"""Within which bounds prepared rows are, by the contract alone: what noise for differential privacy is measured by."""

from __future__ import annotations

from fedkin.data import Column
from fedkin.errors import DataError
from fedkin.federate.contract.contract import Contract


def limits_of(contract: Contract) -> tuple[list[float], float]:
    """The largest absolute values of the prepared columns and of the target.

    Raises
    ------
    DataError
        When the contract gives a number no plausible range, or there is an offset, whose range nobody has agreed on.

    Examples
    --------
    >>> from fedkin.federate import Contract
    >>> from fedkin.federate.sharing.limits import limits_of
    >>> target = 'target = {name = "y", low = 0, high = 9}'
    >>> limits_of(Contract.from_toml(f'name = "h"\\nloss = "linear"\\nfeatures.x = {{low = 0, high = 4}}\\n{target}'))
    ([1.0, 1.0], 9.0)
    """
    schema = contract.schema
    if schema.offset is not None:
        raise DataError(
            f"noise needs bounds on all numbers, but the contract gives none for the offset {schema.offset!r}"
        )
    limits = [1.0] if contract.intercept else []
    for column in schema.features:
        if column.kind == "category":
            limits += [1.0] * len(column.encoded)
        else:
            centre, scale = column.centre_and_scale
            shift = centre if contract.intercept else 0.0
            limits.append(max(abs(end - shift) for end in _range(column)) / scale)
    target = 1.0 if schema.target is None else max(map(abs, _range(schema.target)))
    return limits, target


def _range(column: Column) -> tuple[float, float]:
    if column.low is None or column.high is None:
        raise DataError(
            f"noise needs bounds on all numbers, but the contract gives {column.name!r} no plausible range (low, high)"
        )
    return column.low, column.high
