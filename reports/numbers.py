"""How a number is written: units, digits, thousands, the true minus sign and no-break spaces.

It refuses to know what a number means or where it comes from. Every function returns text for people; exact values go
to CSV and JSON.
"""

from __future__ import annotations

import math

NBSP = "\u00a0"
MINUS = "\u2212"
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def grouped(value: float, decimals: int = 0) -> str:
    """`12350.4` -> `12,350`. Negative values get a true minus; what rounds to zero has no sign."""
    text = f"{abs(value):,.{decimals}f}"
    negative = value < 0 and any(c in "123456789" for c in text)
    return MINUS + text if negative else text


def decimals_for(value: float, spread: float = 0.0, significant: int = 3) -> int:
    """Digits after the point: at most `significant` digits, and none below the leading digit of the spread."""
    if value == 0 or not math.isfinite(value):
        return 0
    digits = significant - 1 - math.floor(math.log10(abs(value)))
    if spread > 0:
        digits = min(digits, -math.floor(math.log10(spread)))
    return max(0, digits)


def plain(value: float, spread: float = 0.0) -> str:
    """A number without a unit: `445`, `1.79`."""
    return grouped(value, decimals_for(value, spread))


def seconds(value: float, spread: float = 0.0) -> str:
    """`248 s`, `9.02 s`, `0.31 s`; digits as the spread allows."""
    return f"{grouped(value, min(2, decimals_for(value, spread)))}{NBSP}s"


def milliseconds(value: float) -> str:
    """Of seconds: `248 ms`; below 10 ms with a digit after the point, `2.5 ms`."""
    return f"{grouped(1000 * value, 0 if value >= 0.01 else 1)}{NBSP}ms"


def tenths(value: float) -> str:
    """One digit after the point, for small means: `1.8`."""
    return grouped(value, 1)


def hundredths(value: float, spread: float = 0.0) -> str:
    """Two digits after the point, and the spread if there is one: `0.86 ± 0.02`; three for one under 0.005."""
    if spread <= 0:
        return grouped(value, 2)
    digits = 3 if spread < 0.005 else 2
    return f"{grouped(value, digits)}{NBSP}±{NBSP}{grouped(spread, digits)}"


def percent(share: float, decimals: int | None = None) -> str:
    """0.24 -> `24 %`. Without `decimals`: whole from 10 % on, one digit below, `0 %` for zero."""
    value = share * 100
    if decimals is None:
        decimals = 1 if 0 < abs(value) < 9.95 else 0
    return f"{grouped(value, decimals)}{NBSP}%"


def signed_percent(ratio: float) -> str:
    """A relative difference: −0.24 -> `−24 %`, 0.57 -> `+57 %`; `0 %` when it rounds to nothing."""
    text = percent(ratio)
    if not any(c in "123456789" for c in text):
        return f"0{NBSP}%"
    return text if ratio < 0 else "+" + text


def points(difference: float) -> str:
    """A difference of two shares: 0.074 -> `+7.4 pt`; `0 pt` when it rounds to nothing."""
    text = grouped(difference * 100, 1)
    if not any(c in "123456789" for c in text):
        return f"0{NBSP}pt"
    return f"{text if difference < 0 else '+' + text}{NBSP}pt"


def dollars(value: float, spread: float = 0.0) -> str:
    """11450.8 -> `$11,450`: four significant digits, fewer if the spread is coarse; cents below $100."""
    if abs(value) < 100:
        return ("" if value >= 0 else MINUS) + f"${abs(value):.2f}"
    unit = 10.0 ** max(0, math.floor(math.log10(abs(value))) - 3)
    if spread > 0:
        unit = max(unit, 10.0 ** (math.floor(math.log10(spread)) - 1))
    return ("" if value >= 0 else MINUS) + f"${round(abs(value) / unit) * unit:,.0f}"


def scientific(value: float, spread: float = 0.0) -> str:
    """Two digits: `0.012`, `1.2 × 10⁻⁴` below a thousandth; with a spread `0.012 ± 0.003`, `(1.2 ± 0.3) × 10⁻⁴`."""
    largest = max(abs(value), spread)
    power = math.floor(math.log10(largest)) if largest > 0 else 0
    scale, digits = (1.0, max(0, 1 - power)) if largest == 0 or power >= -3 else (10.0**-power, 1)
    if spread > 0:
        digits = max(digits, min(digits + 1, -math.floor(math.log10(spread * scale))))
    text = grouped(value * scale, 0 if largest == 0 else digits)
    if spread > 0:
        text += f"{NBSP}±{NBSP}{grouped(spread * scale, digits)}"
        text = f"({text})" if scale > 1 else text
    return text if scale == 1 else f"{text}{NBSP}×{NBSP}10{str(power).translate(_RAISED)}"


def tick(value: float) -> str:
    """A round value on an axis, as short as it can be: `0.25`, `40`, `5 × 10⁻⁴`."""
    if value == 0 or abs(value) >= 1e-3:
        text = f"{abs(value):,.6g}"
    else:
        mantissa, _, power = f"{abs(value):.1e}".partition("e")
        mantissa = mantissa.removesuffix(".0")
        raised = f"10{str(int(power)).translate(_RAISED)}"
        text = raised if mantissa == "1" else f"{mantissa}{NBSP}×{NBSP}{raised}"
    return MINUS + text if value < 0 else text


def size(value: float) -> str:
    """Bytes: `3.2 MB`, `65 GB`."""
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= bytes_:
            return f"{plain(value / bytes_)}{NBSP}{unit}"
    return f"{grouped(value)}{NBSP}B"


def times(ratio: float) -> str:
    """1.3225 -> `1.32 ×`."""
    return f"{grouped(ratio, decimals_for(ratio))}{NBSP}×"


def plus_minus(spread: float) -> str:
    """`± 6`, two digits at most below ten."""
    return f"±{NBSP}{grouped(spread, 0 if spread >= 9.95 else min(2, decimals_for(spread, 0.0, 1)))}"


def listed(words: list[str]) -> str:
    """`A`, `A and B`, `A, B and C`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


COUNT_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def counted(n: int) -> str:
    """Small whole numbers as words, for headings and captions."""
    return COUNT_WORDS[n] if 0 <= n < len(COUNT_WORDS) else grouped(n)
