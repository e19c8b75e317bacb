"""The coordinator's decisions: pure machines, values in, values out, time as an argument.

No torch, sockets, threads, files or clocks. ``coordinator.Coordinator`` has the only ``handle`` and ``next_deadline``
that the actor calls; behind it ``lifecycle.Lifecycle`` composes the others.
"""
