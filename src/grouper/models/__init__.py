"""Models: loading, the policy that is trained, its attention and scores, and saving."""
