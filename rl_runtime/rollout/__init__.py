"""Rollout members: lease prompts, generate completions, reward them, hand them in."""
