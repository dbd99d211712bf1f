"""The checkpointer that a training script holds, the tiers it opens, and what training waits for."""
