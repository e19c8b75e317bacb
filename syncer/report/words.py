"""Numbers as people read them."""

from __future__ import annotations

import numpy as np

_THIN = "\N{NARROW NO-BREAK SPACE}"


def count(value: float) -> str:
    """12 345, with thin spaces."""
    return f"{value:,.0f}".replace(",", _THIN)


def percent(share: float) -> str:
    """No 100 % unless it is all, no 0 % unless it is nothing."""
    if 0.995 <= share < 1:
        return f"{min(100 * share, 99.9):.1f}{_THIN}%"
    if 0 < share < 0.005:
        return f"<{_THIN}0.5{_THIN}%"
    return f"{100 * share:.0f}{_THIN}%"


def size(nbytes: float) -> str:
    """Decimal units, three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g}{_THIN}{unit}"
        nbytes /= 1000
    return f"{nbytes:.3g}{_THIN}EB"


def duration(seconds: float) -> str:
    """The two largest units."""
    if seconds < 1:
        return f"{1000 * seconds:.3g}{_THIN}ms"
    if seconds < 60:
        return f"{seconds:.3g}{_THIN}s"
    whole = round(seconds)
    for large, big, small, little in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= big:
            first, second = whole // big, whole % big // little
            return f"{count(first)}{_THIN}{large} {second}{_THIN}{small}"
    raise AssertionError("a minute at least")


def moment(seconds: float) -> str:
    """Unix seconds as UTC, to the second."""
    text = np.datetime_as_string(np.datetime64(int(seconds), "s"))
    return f"{text.replace('T', ' ')} UTC"
