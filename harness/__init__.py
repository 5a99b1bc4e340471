"""Launch, supervise, inject, measure and judge."""
