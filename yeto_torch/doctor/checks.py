"""The checks before a run, in order: each is ok, or wrong with its cure, and what follows from a wrong one is left out.

It decides what is checked, in which order, and the sentences. A running session is not disturbed: the syncer sees two
connections that say nothing and a few HELLOs that it must refuse (see ``probe``); it logs those and nothing else
changes. It must not know the command line.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

from yeto_torch.doctor.meter import measure
from yeto_torch.doctor.plan import MOST_H, USUAL_H, Plan, Rates, Workload, needed_rate, plan
from yeto_torch.doctor.probe import LONG_HELLO_BYTES, PATIENCE_S, Answer, Said, ask
from yeto_torch.wire.transport.sockets import clock, dial, why
from yeto_torch.wire.transport.tls import ClientTls, TlsError


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``cure`` is there when it is not ok."""

    name: str
    text: str
    cure: str | None = None


@dataclass(frozen=True, slots=True)
class Patient:
    """What is to be checked. Without ``parameters``, ``step_time_s`` and ``learners`` of the fleet no plan is made."""

    address: tuple[str, int]  # host and port of the syncer
    tls: ClientTls | None = None  # how a learner would dial
    key: bytes | None = None  # and sign its HELLO
    streams: int = 4  # data sockets of a learner
    seconds: float = 3.0  # of measuring, per direction
    parameters: float | None = None
    step_time_s: float | None = None
    learners: int | None = None


class WrongError(Exception):
    """A check failed in a way that makes those behind it meaningless."""

    def __init__(self, name: str, text: str, cure: str) -> None:
        super().__init__(text)
        self.finding = Finding(name, text, cure)


def examine(patient: Patient) -> Iterator[Finding]:
    """The findings, one after the other as they come."""
    try:
        yield from _Examination(patient).run()
    except WrongError as wrong:
        yield wrong.finding


@dataclass(slots=True)
class _Examination:
    patient: Patient
    connect_s: float = 0.0
    answer: Answer = field(default_factory=lambda: Answer(Said.SILENT, ""))

    def run(self) -> Iterator[Finding]:
        yield self._name()
        yield self._reach()
        if self.patient.tls is not None:
            yield self._tls(self.patient.tls)
        yield self._protocol()
        yield self._key()
        text = f"{1000 * self.connect_s:.1f} ms to connect, {1000 * self.answer.reply_s:.1f} ms to an answer"
        yield Finding("round trip", text)
        rates = None
        if self.answer.said is Said.LISTENER:
            rates = self._measure()
            yield _rate(rates, self.patient)
        else:
            yield self._bounded_rate()
        yield from self._plan(rates)

    def _name(self) -> Finding:
        host, port = self.patient.address
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            cure = "check the spelling, or give the syncer's address as numbers"
            raise WrongError("name", f"{host} does not resolve ({why(error)})", cure) from error
        addresses = list(dict.fromkeys(str(item[4][0]) for item in found))
        return Finding("name", f"{host} is {', '.join(addresses)}")

    def _reach(self) -> Finding:
        host, port = self.patient.address
        try:
            sock = dial(host, port, PATIENCE_S)
            peer = str(sock.getpeername()[0]) if isinstance(sock, socket.socket) else host
            sock.close()
            started = clock()  # again, with the name resolved
            dial(peer, port, PATIENCE_S).close()
            self.connect_s = clock() - started
        except OSError as error:
            cure = (
                f"is the syncer started, with listen.host=0.0.0.0 listen.port={port}? Does a firewall let TCP port "
                f"{port} through? python -m yeto_torch.doctor --listen there tells them apart"
            )
            raise WrongError("reach", str(error), cure) from error
        return Finding("reach", f"{peer} port {port} accepts connections")

    def _tls(self, tls: ClientTls) -> Finding:
        try:
            dial(*self.patient.address, PATIENCE_S, tls).close()
        except TlsError as error:
            raise WrongError("TLS", str(error), _tls_cure(str(error))) from error
        except OSError as error:
            cure = "is it a syncer with security.tls_cert? Without TLS there, leave out --tls and --tls-ca"
            raise WrongError("TLS", f"the handshake was not finished: {why(error)}", cure) from error
        return Finding("TLS", f"1.3, and the certificate is accepted as that of {tls.server_hostname}")

    def _protocol(self) -> Finding:
        answer = self.answer = ask(self.patient.address, self.patient.tls, self.patient.key)
        match answer.said:
            case Said.TLS_WANTED:
                raise WrongError(
                    "TLS", "this syncer speaks TLS only", "give --tls-ca (the syncer's certificate, or its CA)"
                )
            case Said.TLS_FAILED:
                raise WrongError("TLS", answer.text, _tls_cure(answer.text))
            case Said.WRONG_VERSION:
                raise WrongError("protocol", answer.text, "install the same version of yeto-torch on both machines")
            case Said.STRANGE:
                raise WrongError("protocol", f"no syncer: {answer.text}", "check the port; another program holds it")
            case Said.SILENT:
                cure = "a syncer would have answered: check the port, and what lies in between"
                raise WrongError("protocol", answer.text, cure)
            case Said.LISTENER:
                return Finding("protocol", "version 4; no syncer yet, but a doctor --listen")
            case Said.WRONG_KEY:
                return Finding("protocol", "a syncer; its version shows once the key is right")
        fleet = f" for {answer.learners} learners" if answer.learners else ""
        return Finding("protocol", f"version 4, a syncer{fleet}")

    def _key(self) -> Finding:
        key = self.patient.key
        if self.answer.said is Said.WRONG_KEY:
            if key is None:
                raise WrongError(
                    "key", "this syncer wants a key", "give --hmac-key-file, the file of its security.hmac_key_file"
                )
            cure = "copy the file of security.hmac_key_file to this machine again, as it is, without editing it"
            raise WrongError("key", "this syncer has another key", cure)
        if key is None:
            return Finding("key", "none is needed: whoever reaches the port may join")
        if ask(self.patient.address, self.patient.tls, None).said is not Said.WRONG_KEY:
            cure = "start it with security.hmac_key_file, or the learners without YETO_HMAC_KEY_FILE"
            raise WrongError("key", "we have one, but this syncer has none", cure)
        return Finding("key", "needed, and ours is the right one")

    def _measure(self) -> Rates:
        patient = self.patient
        try:
            return measure(patient.address, patient.tls, patient.key, patient.streams, patient.seconds)
        except OSError as error:
            cure = "let nobody else measure, and look at what the other end says"
            raise WrongError("rate", f"could not be measured: {error}", cure) from error

    def _bounded_rate(self) -> Finding:
        """A syncer takes 60 kB from a stranger and no more, which bounds a slow line and says little of a fast one."""
        answer = ask(self.patient.address, self.patient.tls, self.patient.key, long=True)
        if answer.said is not Said.SYNCER:
            return Finding("rate", f"not measured: {answer.text}")
        seconds = max(answer.reply_s, 1e-6)
        return Finding(
            "rate",
            f"at least {_megabytes(LONG_HELLO_BYTES / seconds)} up ({LONG_HELLO_BYTES // 1000} kB answered after "
            f"{1000 * seconds:.1f} ms); a syncer takes no more from a stranger. To measure it, before the run: "
            f"python -m yeto_torch.doctor --listen {self.patient.address[1]} in its place",
        )

    def _plan(self, rates: Rates | None) -> Iterator[Finding]:
        parameters, step_time_s = self.patient.parameters, self.patient.step_time_s
        learners = self.patient.learners or self.answer.learners
        if parameters is None or step_time_s is None or learners is None:
            return
        workload = Workload(parameters, step_time_s, learners)
        yield _needs(workload) if rates is None else _advice(workload, plan(workload, rates))


def _tls_cure(text: str) -> str:
    if "does not speak it" in text:
        return "this port has no TLS: start the syncer with security.tls_cert and .tls_key, or leave out --tls-ca"
    if "requires a client certificate" in text or "does not accept our certificate" in text:
        return "give --tls-cert and --tls-key, signed by the authority of the syncer's security.tls_client_ca"
    if "certificate is not accepted" in text:
        return (
            "--tls-ca must be the syncer's certificate or its authority's; the certificate must name the host dialled"
        )
    return "see SECURITY.md"


def _rate(rates: Rates, patient: Patient) -> Finding:
    how = f"over {patient.streams} streams{', TLS included' if patient.tls is not None else ''}"
    return Finding("rate", f"{_megabytes(rates.up)} up, {_megabytes(rates.down)} down, measured {how}")


def _needs(workload: Workload) -> Finding:
    needs = ", ".join(f"{dtype} {_megabytes(needed_rate(workload, dtype))}" for dtype in ("f32", "bf16", "q4"))
    return Finding("plan", f"for H = {USUAL_H} the syncer's line must carry in each direction: {needs}")


def _advice(workload: Workload, advice: Plan) -> Finding:
    least = ", ".join(f"{dtype} {steps}" for dtype, steps in advice.least_steps.items())
    text = (
        f"wire_dtype={advice.wire_dtype}, schedule.sync_interval_steps={advice.interval_steps}: all "
        f"{workload.learners} learners exchange the whole model in {advice.sync_s:.3g} s, the line is busy "
        f"{100 * advice.busy:.0f} % of the time (least H: {least})"
    )
    if advice.feasible:
        return Finding("plan", text)
    cure = f"H above {MOST_H} is too long: train fewer parameters (a LoRA), fewer learners, or a faster line"
    return Finding("plan", text, cure)


def _megabytes(rate: float) -> str:
    return f"{rate / 1e6:.3g} MB/s"
