"""yeto-torch: a fleet of learners trains one model through a small syncer.

    from yeto_torch import YetoOuterOptimizer

    optimizer = YetoOuterOptimizer(optimizer, model.named_parameters())

The names below are imported when they are first used. ``import yeto_torch`` alone therefore loads no torch, and the
syncer, which shares ``yeto_torch.wire`` and ``yeto_torch.wire.transport``, never loads the learner.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yeto_torch.config import LearnerConfig
    from yeto_torch.launcher.final import load_final
    from yeto_torch.learner.syncs import Sync
    from yeto_torch.optimizer import YetoOuterOptimizer
    from yeto_torch.wire.errors import (
        ConnectionLostError,
        LocalError,
        NonFiniteError,
        PeerError,
        RefusedError,
        RunError,
        StateError,
        YetoError,
    )
    from yeto_torch.wire.model_layout import Layout

__version__ = "0.1.0"

__all__ = [
    "YetoOuterOptimizer",
    "LearnerConfig",
    "Layout",
    "Sync",
    "load_final",
    "YetoError",
    "PeerError",
    "LocalError",
    "StateError",
    "RunError",
    "RefusedError",
    "ConnectionLostError",
    "NonFiniteError",
    "__version__",
]

_HOME = {
    "YetoOuterOptimizer": "yeto_torch.optimizer",
    "LearnerConfig": "yeto_torch.config",
    "Layout": "yeto_torch.wire.model_layout",
    "Sync": "yeto_torch.learner.syncs",
    "load_final": "yeto_torch.launcher.final",
}


if not TYPE_CHECKING:  # a type checker should see the imports above, not an attribute of any name

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOME.get(name, "yeto_torch.wire.errors")), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
