"""Training loops without recovery, which the benchmarks compare with."""
