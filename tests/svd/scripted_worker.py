"""A child that speaks the pool's framing, and misbehaves as its first argument says. It does not load torch."""

import os
import signal
import subprocess
import sys

from syncer.config.policy import IsoScale
from syncer.svd import framing
from syncer.svd.framing import Request


def read():
    header = bytearray(framing.HEADER_BYTES)
    try:
        framing.receive(0, header)
    except EOFError:
        sys.exit(0)
    request = framing.parse_request(header)
    payload = bytearray(request.payload_bytes)
    framing.receive(0, payload)
    return request, payload


def echo(request, payload):
    framing.send(1, framing.matrix_header(request), memoryview(payload))


def hang():
    while True:
        signal.pause()


def misbehave(mode, request, payload):  # noqa: C901 - one flat table of misdeeds
    header = bytearray(framing.matrix_header(request))
    match mode:
        case "echo":
            echo(request, payload)
        case "negate":
            payload[3::4] = bytes(byte ^ 0x80 for byte in payload[3::4])  # the sign bit of each f32
            echo(request, payload)
        case "garbage":
            framing.send(1, os.urandom(1 << 12))
        case "wrong-magic":
            header[:4] = b"YSVQ"
            framing.send(1, bytes(header), memoryview(payload))
        case "wrong-status":
            header[4] = 9
            framing.send(1, bytes(header), memoryview(payload))
        case "wrong-id":
            echo(Request(request.number + 1, IsoScale.MEAN, request.rows, request.cols), payload)
        case "wrong-shape":
            echo(Request(request.number, IsoScale.MEAN, request.cols, request.rows), payload)
        case "wrong-length":
            framing.send(1, bytes(header[:32]), (len(payload) - 4).to_bytes(8, "little"), memoryview(payload)[4:])
        case "endless-text":
            framing.send(1, framing.failure_frame(request, "")[:32], (1 << 62).to_bytes(8, "little"))
        case "nan":
            payload[-4:] = b"\x00\x00\xc0\x7f"
            echo(request, payload)
        case "infinity":
            payload[:4] = b"\x00\x00\x80\x7f"
            echo(request, payload)
        case "refuse":
            framing.send(1, framing.failure_frame(request, "it did not converge"))
        case "half":
            framing.send(1, bytes(header), memoryview(payload)[: len(payload) // 2])
            sys.exit(4)
        case "half-then-silence":
            framing.send(1, bytes(header), memoryview(payload)[: len(payload) // 2])
            hang()
        case "close":
            os.close(1)
            hang()
        case "exit":
            sys.exit(3)
        case "twice":
            echo(request, payload)
            echo(request, payload)
        case "silence":
            hang()


def main():
    mode = sys.argv[1]
    match mode:
        case "exit-at-once":
            sys.exit(7)
        case "never-ready":
            hang()
        case "stubborn":
            for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(signum, signal.SIG_IGN)
            hang()
    gate = os.open(sys.argv[2], os.O_RDONLY) if mode == "gate" else None
    request, payload = read()
    if mode == "wrong-probe":
        payload[3] ^= 0x80
    echo(request, payload)
    match mode:
        case "babble":
            framing.send(1, b"!")
        case "deaf":
            hang()
        case "die-idle":
            sys.exit(5)
        case "grandchild":
            subprocess.Popen(["sleep", "1000"])
    while True:
        request, payload = read()
        if gate is not None:  # one byte from the gate lets one request through
            os.read(gate, 1)
            echo(request, payload)
        elif mode == "grandchild":
            hang()
        else:
            misbehave(mode, request, payload)


if __name__ == "__main__":
    main()
