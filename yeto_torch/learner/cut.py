"""The final cut, as a learner sees it: what has come of it, whether it is installed, how far its acknowledgement got.

It decides when the cut is whole and what is a violation of it. It must not know broadcasts: a BCAST of the same
version neither completes nor contradicts the cut, which is always f32 and has a cache of its own.

    MISSING    | no manifest, or a fragment's exact version is absent          | a lost connection takes all of it
    WHOLE      | everything is here and not yet in the parameters
    INSTALLED  | in the parameters; the bytes are dropped, versions stay       | survives a lost connection, but must
               |                                                               | arrive again before it is acknowledged
    STARTED    | acknowledgement queued on this connection: SHUTDOWN is legal  | back to INSTALLED
    ACKED      | its bytes left, once in the life of the process

* pure

Source: v4 §Final cut (a cache apart from BCAST; manifest and exact versions, then the ACK; SHUTDOWN not before),
v4 §Generations (each begins anew); rulings §5.10.
"""

from __future__ import annotations

from yeto_torch.learner.effects import Install
from yeto_torch.wire.buffers import Buffer
from yeto_torch.wire.errors import PeerError
from yeto_torch.wire.messages import FinalFragment, FinalManifest

_COMPARE_BYTES = 1 << 20


class FinalCut:
    """The final cut of a layout of ``fragments`` fragments."""

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self._held: dict[int, FinalFragment] = {}
        self.manifest: FinalManifest | None = None  # of this connection
        self.installed: FinalManifest | None = None  # what the parameters hold
        self.started = False  # its acknowledgement was queued on this connection
        self.acked = False  # it was handed to a socket

    def reset(self) -> None:
        """The connection is gone, and with it what it had sent."""
        self._held.clear()
        self.manifest = None
        self.started = False

    def accept_fragment(self, message: FinalFragment) -> None:
        """Monotonic per fragment. Raises PeerError for a version beyond the manifest, or other bytes of one version."""
        self._check_version(message)
        held = self._held.get(message.fragment)
        if held is None or message.version > held.version:
            self._held[message.fragment] = message
        elif message.version == held.version and len(held.data) and not same_bytes(held.data, message.data):
            raise PeerError(
                f"FINAL_FRAGMENT {message.fragment}: version {message.version} came twice with different bytes"
            )
        self._drop_installed_bytes()

    def accept_manifest(self, manifest: FinalManifest) -> None:
        """Raises PeerError when it does not fit the layout, a fragment that came, or an earlier manifest."""
        if len(manifest.versions) != self._fragments:
            raise PeerError(f"FINAL_MANIFEST names {len(manifest.versions)} fragments, the layout {self._fragments}")
        if self.manifest is not None and manifest != self.manifest:
            raise PeerError(f"a second FINAL_MANIFEST (step {manifest.step}) differs from the first")
        self.manifest = manifest
        for held in self._held.values():
            self._check_version(held)
        self._drop_installed_bytes()

    def missing(self) -> list[int]:
        """Fragments whose exact version is not here."""
        versions = (None,) * self._fragments if self.manifest is None else self.manifest.versions
        return [f for f, version in enumerate(versions) if f not in self._held or self._held[f].version != version]

    @property
    def is_whole(self) -> bool:
        """Has this connection brought all of it?"""
        return self.manifest is not None and not self.missing()

    @property
    def to_install(self) -> bool:
        """Is it whole, and not what the parameters hold?"""
        return self.manifest != self.installed and self.is_whole

    @property
    def to_acknowledge(self) -> bool:
        """Is it whole, in the parameters, and not acknowledged on this connection?"""
        return self.manifest == self.installed and not self.started and self.is_whole

    def installation(self) -> Install | None:
        """What brings it into the parameters; None while that is not due."""
        return Install(self.manifest, self.data()) if self.manifest is not None and self.to_install else None

    def data(self) -> tuple[Buffer, ...]:
        """The f32 bytes of every fragment, in order."""
        return tuple(self._held[fragment].data for fragment in range(self._fragments))

    def mark_installed(self, manifest: FinalManifest) -> None:
        """``manifest`` is in the parameters."""
        self.installed = manifest
        self._drop_installed_bytes()

    def _check_version(self, final: FinalFragment) -> None:
        if self.manifest is not None and final.version > self.manifest.versions[final.fragment]:
            raise PeerError(
                f"FINAL_FRAGMENT {final.fragment} of version {final.version}, "
                f"the manifest says {self.manifest.versions[final.fragment]}"
            )

    def _drop_installed_bytes(self) -> None:
        if self.installed is not None and self.manifest == self.installed:
            self._held = {f: FinalFragment(f, held.version, b"") for f, held in self._held.items()}


def same_bytes(one: Buffer, other: Buffer) -> bool:
    """Equality of two buffers, block by block: as fast as memory, without a second copy of either."""
    a, b = memoryview(one).cast("B"), memoryview(other).cast("B")
    return len(a) == len(b) and all(
        bytes(a[i : i + _COMPARE_BYTES]) == bytes(b[i : i + _COMPARE_BYTES]) for i in range(0, len(a), _COMPARE_BYTES)
    )
