"""Ranks' connections led through a process of the run's own, so that each directed link can be
shaped.

``proxy`` is that process, ``shaping`` what it does to a link, ``client`` the launcher's side of it,
``route`` the rank's. A link is named by two processes, source and destination: a replacement for a
rank gets links of its own.
"""
