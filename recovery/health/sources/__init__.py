"""Places where health readings come from, a file each, behind one protocol
(``recovery.health.readings.reading.HealthSource``).
"""
