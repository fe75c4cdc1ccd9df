"""Bridges to what others use: random states, other checkpoint formats, other engines' calls. Nothing in the core knows of them."""
