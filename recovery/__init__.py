"""The recovery stack: detection, strategies, mechanisms. Usable without the harness."""
