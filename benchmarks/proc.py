"""What the kernel says about a process's memory (Linux). Bytes."""

from __future__ import annotations

from pathlib import Path

AVAILABLE = Path("/proc/self/clear_refs").exists()


def resident(pid: int | str = "self") -> int:
    """Memory in use now."""
    return _status(pid, "VmRSS")


def peak(pid: int | str = "self") -> int:
    """The most that was in use, since ``forget_peak`` or the start."""
    return _status(pid, "VmHWM")


def forget_peak(pid: int | str = "self") -> None:
    """Count the peak anew from what is in use now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def _status(pid: int | str, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/{pid}/status does not tell {field}")
