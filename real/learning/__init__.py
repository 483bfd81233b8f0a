"""Learning: advantages, losses, their corrections and aggregation as pure torch functions; one module per idea."""
