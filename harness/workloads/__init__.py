"""Built-in training workloads, one file each."""
