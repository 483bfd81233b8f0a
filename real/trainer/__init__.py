"""Trainer: FSDP2 ranks that score recorded tokens and update the actor, and the facade that drives them."""
