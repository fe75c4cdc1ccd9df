"""The reinforcement-learning runtime: controller, policy members and rollout members of one asynchronous GRPO run."""
