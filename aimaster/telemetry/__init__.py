"""How the programs show themselves: logs, secrets kept out of excerpts, tokens, health and metrics over HTTP. Decides nothing."""
