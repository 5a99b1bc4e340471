"""What looks wrong in health readings: a detector a file, each with a stated rate of false alarms
(``recovery.health.detectors.base.Detector``). Pure.
"""
