"""Learning: advantages, losses and their aggregation as pure torch functions; one module per idea."""
