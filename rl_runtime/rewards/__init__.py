"""Rewards: what a completion earns, by functions with weights, the slow ones in processes of their own."""
