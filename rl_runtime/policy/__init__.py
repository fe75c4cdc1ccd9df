"""Policy members: they compute gradients of their shares, reduce them with their peers, and apply what the ledger has committed."""
