"""The threaded socket shell both peers use: it moves bytes and decides nothing about the run.

``outbox`` is the pure machine that says what goes out next on which socket, ``sockets`` the pieces for a single
socket, ``group`` the 1 + S sockets of one connection generation. No torch, no knowledge of rounds or training.
"""
