"""Leads ranks' connections through a proxy process of the run, so that each directed link can be
shaped.

``proxy`` is that process, ``shaping`` its model of a link, ``client`` the launcher's side,
``route`` the rank's side. A link is named by two processes, source and destination: a replacement
for a rank gets its own links.
"""
