"""One rank: joining, the job a training loop uses, its steps, and the agent thread."""
