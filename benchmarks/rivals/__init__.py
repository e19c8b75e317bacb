"""Other systems, each as a worker of its own interpreter: ready, meet, then prepare and sync as often as asked.

ready     an address if the others need one         prepare   whatever comes before the sync and is not measured
meet      find each other                           sync      [monotonic begin, monotonic end]
"""
