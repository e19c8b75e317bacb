"""What the fragments are by name: a model's tensors in wire order, the fingerprint of them all, and their file.

``Layout`` has names and full shapes and lives on the learner; its SHA-256 fingerprint keeps learners with equal sizes
but other tensors apart. What of it travels is ``layout.WireLayout``. The file is the one that the wire's room opens:
learners write it, and the syncer reads names and shapes from it.

Source: v4 §Layout and fingerprint (names, order and full shapes are hashed); rulings §2.5, §2.6.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from yeto_torch.wire.constants import U64_MAX, MergeMode
from yeto_torch.wire.errors import StateError
from yeto_torch.wire.layout import WireFragment, WireLayout

_FINGERPRINT_DOMAIN = b"yeto-layout-v1\0"
_CONTRACT_DOMAIN = b"yeto-torch-run-v1\0"
_FILE_FORMAT = "yeto-layout-v1"
_QUOTE_LIMIT = 200  # characters
_MAX_DIMS = 64  # of a torch tensor


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named parameter and its full torch shape (a scalar has shape ())."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Fragment:
    """Tensors that travel and are merged together, in wire order."""

    mode: MergeMode
    tensors: tuple[Tensor, ...]

    @property
    def numel(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)


@dataclass(frozen=True)
class Layout:
    """The semantic layout of one model: fragments of named tensors.

    Attributes:
        fragments: in wire order; fragment f is updated by rounds t with (t - 1) mod F = f.
        fingerprint: 32 bytes, SHA-256 of the canonical encoding.
    """

    fragments: tuple[Fragment, ...]

    def __len__(self) -> int:
        return len(self.fragments)

    @cached_property
    def fingerprint(self) -> bytes:
        digest = hashlib.sha256(_FINGERPRINT_DOMAIN)
        digest.update(struct.pack("<I", len(self.fragments)))
        for fragment in self.fragments:
            digest.update(struct.pack("<BI", fragment.mode, len(fragment.tensors)))
            for tensor in fragment.tensors:
                name = tensor.name.encode()
                digest.update(struct.pack("<I", len(name)) + name)
                digest.update(struct.pack("<QI", tensor.numel, len(tensor.shape)))
                digest.update(struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape))
        return digest.digest()

    @cached_property
    def wire(self) -> WireLayout:
        """The numeric view that HELLO carries."""
        return WireLayout(
            tuple(
                WireFragment(
                    fragment.mode,
                    tuple(tensor.numel for tensor in fragment.tensors),
                    tuple((t.shape[0], t.shape[1]) for t in fragment.tensors) if fragment.mode is MergeMode.ISO else (),
                )
                for fragment in self.fragments
            )
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors in wire order."""
        return tuple(tensor for fragment in self.fragments for tensor in fragment.tensors)

    def save(self, path: str | Path) -> None:
        """Write the layout as JSON; ``python -m syncer.export layout=PATH`` reads names and shapes from it."""
        document = {
            "format": _FILE_FORMAT,
            "fingerprint": self.fingerprint.hex(),
            "fragments": [
                {
                    "merge": fragment.mode.name.lower(),
                    "tensors": [{"name": t.name, "shape": list(t.shape)} for t in fragment.tensors],
                }
                for fragment in self.fragments
            ],
        }
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Layout:
        """Read what ``save`` wrote. Raises StateError naming the file and what is wrong with it."""
        try:
            if Path(path).exists() and not Path(path).is_file():  # opening a pipe would wait for its other end
                raise StateError(f"layout file {path}: not a regular file")
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise StateError(f"layout file {path}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise StateError(f"layout file {path}: not JSON: {_short(error)}") from error
        try:
            layout = _from_document(document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"layout file {path}: malformed ({type(error).__name__}: {_short(error)})") from error
        said, ours = str(document.get("fingerprint"))[:_QUOTE_LIMIT], layout.fingerprint.hex()
        if said != ours:
            raise StateError(f"layout file {path}: its fingerprint {said!r} is not that of its tensors, {ours}")
        return layout


def _from_document(document: Any) -> Layout:
    if document["format"] != _FILE_FORMAT:
        raise ValueError(f"format {document['format']!r}, expected {_FILE_FORMAT!r}")
    fragments = []
    for entry in document["fragments"]:
        tensors = [_tensor(item["name"], item["shape"]) for item in entry["tensors"]]
        mode = MergeMode[str(entry["merge"]).upper()]
        if not tensors or (mode is MergeMode.ISO and any(len(t.shape) != 2 for t in tensors)):
            raise ValueError("a fragment without tensors, or an iso tensor that is not a matrix")
        fragments.append(Fragment(mode, tuple(tensors)))
    if not fragments:
        raise ValueError("no fragments")
    if sum(fragment.numel for fragment in fragments) > U64_MAX:
        raise ValueError("the number of values overflows 64 bits")
    return Layout(tuple(fragments))


def _tensor(name: object, shape: object) -> Tensor:
    dims = shape if isinstance(shape, list) else [0]
    is_shape = len(dims) <= _MAX_DIMS and all(type(d) is int and d >= 1 for d in dims)
    if not isinstance(name, str) or not is_shape:
        raise ValueError(f"tensor {name!r} of shape {shape!r}")
    name.encode()  # half of a surrogate pair is no text: a ValueError
    return Tensor(name, tuple(dims))


def _short(error: Exception) -> str:
    """One line of what an error says: it may quote the whole file."""
    text = str(error)
    return text if len(text) <= _QUOTE_LIMIT else f"{text[:_QUOTE_LIMIT]} ..."


def contract_hash(fingerprint: bytes, run_id: str | None) -> bytes:
    """The session contract our learner derives: the fingerprint itself, or SHA-256 over it and the run id."""
    if run_id is None:
        return fingerprint
    return hashlib.sha256(_CONTRACT_DOMAIN + fingerprint + run_id.encode()).digest()
