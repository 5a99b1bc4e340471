"""The scenario: typed, strict models of the YAML. ``chaos.loading`` makes them from files."""
