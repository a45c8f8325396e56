"""Units that are often mistaken for each other, and a guess at which one a column is in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedkin._base import Array


@dataclass(frozen=True)
class Conversion:
    """A value in another unit is ``factor`` times the value in the agreed unit, plus ``shift``."""

    words: str
    factor: float
    shift: float = 0.0

    def undone(self, values: Array) -> Array:
        """The values in the agreed unit."""
        return (values - self.shift) / self.factor

    @property
    def step(self) -> str:
        """How to get to the agreed unit."""
        minus = f"less {self.shift:g} and " if self.shift else ""
        if self.factor == 1:
            return f"less {self.shift:g}"
        return f"{minus}divided by {self.factor:g}" if self.factor > 1 else f"{minus}times {1 / self.factor:.6g}"


#: {agreed unit: what people send instead}.
_BY_UNIT: dict[str, tuple[Conversion, ...]] = {
    "kg": (Conversion("grams", 1000), Conversion("pounds", 2.2046), Conversion("stones", 1 / 6.35029)),
    "g": (Conversion("kilograms", 0.001), Conversion("ounces", 1 / 28.3495)),
    "m": (Conversion("centimetres", 100), Conversion("millimetres", 1000), Conversion("feet", 3.28084)),
    "cm": (Conversion("metres", 0.01), Conversion("millimetres", 10), Conversion("inches", 1 / 2.54)),
    "mm": (Conversion("centimetres", 0.1), Conversion("inches", 1 / 25.4)),
    "km": (Conversion("metres", 1000), Conversion("miles", 0.621371)),
    "years": (Conversion("months", 12), Conversion("days", 365.25)),
    "months": (Conversion("years", 1 / 12), Conversion("days", 30.44)),
    "weeks": (Conversion("days", 7), Conversion("months", 1 / 4.345)),
    "days": (Conversion("hours", 24), Conversion("years", 1 / 365.25), Conversion("weeks", 1 / 7)),
    "hours": (Conversion("minutes", 60), Conversion("days", 1 / 24)),
    "minutes": (Conversion("seconds", 60), Conversion("hours", 1 / 60)),
    "s": (Conversion("milliseconds", 1000), Conversion("minutes", 1 / 60)),
    "mmhg": (Conversion("kPa", 0.133322), Conversion("cmHg", 0.1)),
    "kpa": (Conversion("mmHg", 7.50062),),
    "c": (Conversion("degrees Fahrenheit", 1.8, 32), Conversion("kelvin", 1, 273.15)),
    "f": (Conversion("degrees Celsius", 5 / 9, -160 / 9),),
    "mmol/l": (
        Conversion("mg/dL of cholesterol", 38.67),
        Conversion("mg/dL of glucose", 18.016),
        Conversion("mg/dL of triglycerides", 88.57),
    ),
    "mg/dl": (
        Conversion("mmol/L of cholesterol", 1 / 38.67),
        Conversion("mmol/L of glucose", 1 / 18.016),
        Conversion("mmol/L of triglycerides", 1 / 88.57),
        Conversion("umol/L of creatinine", 88.42),
    ),
    "umol/l": (Conversion("mg/dL of creatinine", 1 / 88.42), Conversion("mmol/L", 0.001)),
    "g/dl": (Conversion("g/L", 10), Conversion("mmol/L of haemoglobin", 0.6206)),
    "g/l": (Conversion("g/dL", 0.1),),
    "%": (Conversion("shares of 1", 0.01),),
}
_ALIASES = {
    "kg": "kilogram kilograms",
    "g": "gram grams",
    "m": "metre metres meter meters",
    "years": "year y yr a",
    "months": "month",
    "weeks": "week",
    "days": "day d",
    "hours": "hour h",
    "minutes": "minute min",
    "s": "second seconds sec",
    "c": "°c celsius degc",
    "f": "°f fahrenheit degf",
    "umol/l": "µmol/l μmol/l",
    "%": "percent",
}
_SAME = {alias: unit for unit, names in _ALIASES.items() for alias in names.split()}
_POWERS = (1000.0, 0.001, 10.0, 0.1, 100.0, 0.01, 1e6, 1e-6)
_POWER_WORDS = {1000.0: "a thousandth of the unit", 0.001: "a thousand times the unit"}
#: So many of the values must fit after the conversion.
_MOST = 0.9


def other_unit(
    values: Array, unit: str, plausible: tuple[float | None, float | None], *, narrow: bool = False
) -> str | None:
    """What was likely done to the unit of values that are out of range, in words; None when nothing explains them.

    ``narrow`` is for values within the range, but in a corner of it: then they must fill a good part of the range.

    Examples
    --------
    >>> other_unit(np.array([70_000.0, 81_000.0, 64_500.0]), "kg", (30.0, 250.0))
    'divided by 1000 they fit: grams?'
    >>> other_unit(np.array([190.0, 240.0, 205.0]), "mmol/L", (2.0, 12.0))
    'divided by 38.67 they fit: mg/dL of cholesterol?'
    """
    low, high = plausible
    if low is None or high is None or values.size == 0:
        return None
    key = "".join(unit.lower().split())
    named = _BY_UNIT.get(_SAME.get(key, key), ())
    known = {one.factor for one in named}
    plain = tuple(Conversion(_POWER_WORDS.get(power, ""), power) for power in _POWERS if power not in known)
    # named units first: a guess with a name is worth more than one without, among those of one name the most central
    for group in (named, plain):
        fitting = [one for one in group if _share(one, values, low, high) >= _MOST]
        if narrow:
            fitting = [one for one in fitting if np.ptp(one.undone(values)) > 0.05 * (high - low)]
        if fitting:
            best = min(fitting, key=lambda one: abs(np.median(one.undone(values)) - (low + high) / 2))
            return f"{best.step} they fit" + (f": {best.words}?" if best.words else "")
    return None


def _share(conversion: Conversion, values: Array, low: float, high: float) -> float:
    undone = conversion.undone(values)
    return float(((undone >= low) & (undone <= high)).mean())
