"""The mathematics of the runtime: pure functions under the papers' names. They do no I/O and read no clock.

`advantage` and `staleness` need no tensors, so that the controller can use them without torch.
"""
