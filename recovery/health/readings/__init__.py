"""What health sources say: readings, problems, and the reports of a driver. Pure."""
