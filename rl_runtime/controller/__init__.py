"""The controller: the one writer of steps and epochs, with a durable account of every prompt.

Flow of a prompt: prompts -> leases -> account -> batches -> group -> account. The pure modules (account, prompts, leases, shares,
batches, group, joining) are told the time; ledger, serve, pulse and storage act. No torch, no numpy: it starts in a blink.
"""
