"""One rank: joining, the job a training loop holds, its steps, and the part that listens."""
