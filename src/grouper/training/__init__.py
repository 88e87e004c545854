"""Training: the update shared by SFT and GRPO, the two phases, checkpoints, and a whole run."""
