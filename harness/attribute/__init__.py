"""The fault catalogue as an examination of whoever diagnoses."""
