"""How many files and sockets this process may have open."""

from __future__ import annotations

import resource

_MAX_DESCRIPTORS = 65_536


def allow_many_descriptors() -> None:
    """As many as the administrator allows, up to ``_MAX_DESCRIPTORS``, not as few as a shell asks for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_descriptors() -> int:
    """How many files and sockets this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30
