"""The composition root: builds the rooms, opens the files in the right order, owns the exit code.

    what the file alone decides about resuming -> tape -> listener -> address file -> the actor's loop -> goodbye

Nothing listens before the checkpoint is known to be usable; nothing is written before the port is ours.

Source: v4 §Checkpoints (resume, the marker), v4 §Final cut; rulings §6.10, §6.11, §6.12.
"""

from __future__ import annotations

import logging
import os
import signal
from functools import partial
from pathlib import Path
from threading import Thread

import torch

from syncer.actor import Actor, Inbox, clock
from syncer.checkpoint import files
from syncer.checkpoint.format import Snapshot
from syncer.checkpoint.resume import at_hello, at_start
from syncer.config.policy import CheckpointPolicy, SyncerPolicy
from syncer.core import effects as fx
from syncer.core import events as ev
from syncer.core.admission import ResumePoint
from syncer.core.coordinator import Coordinator
from syncer.descriptors import allow_many_descriptors
from syncer.server import Server
from syncer.state import resolve_device
from syncer.tape import Tape
from yeto_torch.wire import codec
from yeto_torch.wire.errors import RunError, StateError

log = logging.getLogger("syncer")

_INTERRUPTED = 130
_GOODBYE_S = 2.0  # for SHUTDOWN or ERROR to reach everybody before the process ends


def run(policy: SyncerPolicy, profile: bytes) -> int:
    """Serve one run; returns the exit code (0 complete, 1 failed, 2 configuration, 130 interrupted)."""
    allow_many_descriptors()
    try:
        device = resolve_device(policy.merge.device)
    except ValueError as error:
        log.error("configuration error: %s", error)
        return 2
    try:
        snapshot = _load(policy)
        tape = Tape(policy.tape_path)
    except (RunError, StateError) as error:
        log.error("%s", error)
        return 1
    try:
        finish = _serve(policy, profile, device, tape, snapshot)
    except (RunError, StateError) as error:
        finish = fx.Finish(1, str(error))
    finally:
        tape.close()
    if finish.code:
        log.log(logging.INFO if finish.code == _INTERRUPTED else logging.ERROR, "%s", finish.text)
    return finish.code


def _serve(
    policy: SyncerPolicy, profile: bytes, device: torch.device, tape: Tape, snapshot: Snapshot | None
) -> fx.Finish:
    codec.keep_spare(policy.schedule.pipeline * (policy.learners + 1))  # the answers, and what they are merged into
    inbox = Inbox()
    server = Server(policy, device, inbox.post)
    address = server.listen()
    try:
        _install_signals(inbox)
        step = snapshot.step if snapshot is not None else 0
        if policy.checkpoint.mark_final and policy.checkpoint.path is not None and step < policy.total_steps:
            files.remove_marker(policy.checkpoint.path)
        tape.event("start", step=step, total_steps=policy.total_steps, profile=profile.hex())
        if policy.listen.address_file is not None:
            _announce(policy.listen.address_file, address)
        log.info("syncer listening on %s", address)
        finish = Actor(policy, _coordinator(policy, profile, snapshot), device, tape, server, inbox, snapshot).run()
    except BaseException:
        server.close()
        raise
    server.close(finish.text if finish.terminal else None, _GOODBYE_S if finish.terminal or not finish.code else 0.0)
    return finish


def _announce(path: Path, address: str) -> None:
    """``host:port`` for whoever waits for it; appears whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(address + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise StateError(f"listen.address_file {path}: {error.strerror or error}") from error


def _coordinator(policy: SyncerPolicy, profile: bytes, snapshot: Snapshot | None) -> Coordinator:
    resumed = None
    if snapshot is not None:
        rows = tuple((e.learner, e.merges, e.steps, e.tokens) for e in snapshot.ledger)
        resumed = ResumePoint(snapshot.step, rows, partial(at_hello, snapshot.facts))
    return Coordinator(policy, profile, resumed)


def _load(policy: SyncerPolicy) -> Snapshot | None:
    """The checkpoint to continue from, judged by what the file alone tells. Raises StateError with the reason."""
    checkpoint: CheckpointPolicy = policy.checkpoint
    if checkpoint.path is None:
        return None
    files.remove_stale_temporaries(checkpoint.path)
    exists = checkpoint.path.exists()
    if checkpoint.resume == "false":
        if exists:
            log.warning(
                "checkpoint.path %s exists and checkpoint.resume=false: a fresh run will replace it", checkpoint.path
            )
        return None
    if not exists:
        if checkpoint.resume == "true":
            raise StateError(
                f"checkpoint.resume=true, but checkpoint.path {checkpoint.path} does not exist; "
                f"checkpoint.resume=auto would start fresh"
            )
        return None
    snapshot = files.read_checkpoint(checkpoint.path)
    if (refusal := at_start(snapshot.facts, int(policy.merge.iso_backend), policy.total_steps)) is not None:
        raise StateError(f"checkpoint {checkpoint.path}: {refusal}")
    log.info("resuming from %s at step %d", checkpoint.path, snapshot.step)
    return snapshot


def _install_signals(inbox: Inbox) -> None:
    """The first SIGINT or SIGTERM ends the run cleanly, a second one at once.

    A thread of their own hears them: the system may deliver a signal to any thread, and the main one, asleep at its
    inbox, would then not wake to run a handler.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in numbers:
        signal.signal(number, lambda *_: None)  # the pipe tells
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def hear() -> None:
        while os.read(reading, 1)[0] not in numbers:
            pass

    def listen() -> None:
        hear()
        inbox.post(ev.Interrupted(), clock())
        hear()
        os._exit(_INTERRUPTED)

    Thread(target=listen, name="signals", daemon=True).start()
