"""The treaty: everything both peers must agree on, as pure functions and machines over bytes.

Nothing here opens a socket, starts a thread or reads a clock. Only ``codec`` imports torch. ``README.md``
in this folder is the wire on two pages.
"""
