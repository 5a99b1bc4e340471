"""Checkpoints of one rank: saved and restored, on disk (``files``, ``saves``) and in memory
(``memory``).
"""
