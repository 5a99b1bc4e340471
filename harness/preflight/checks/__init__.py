"""What is measured of a place, and what that says: one file a check, and what they share."""
