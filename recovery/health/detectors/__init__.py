"""What looks wrong in readings: detectors, each with a stated rate of false alarms. Pure."""
