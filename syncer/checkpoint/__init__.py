"""Checkpoint files: the byte format, the decision whether to resume, and the durable write.

``format`` knows bytes, ``resume`` knows the rules, ``files`` knows the disk.
"""
