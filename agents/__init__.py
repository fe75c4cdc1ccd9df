"""The node's sidecar, a program and no library: it starts the node's members, sees what happens to them, says so to the master, and
owns the node's snapshot memory. Nothing of it is needed for training to go on. No torch, no numpy.
"""
