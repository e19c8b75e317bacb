"""What both peers share: everything they must agree on, and the sockets that carry it.

The modules of this folder are values and machines over bytes: no socket, no thread, no clock, and but for
``model_layout`` no file. ``codec`` alone knows torch and numpy; ``transport`` alone touches the network and knows
neither. Nothing here knows training, rounds or files of a run. ``README.md`` is the wire on two pages.
"""
