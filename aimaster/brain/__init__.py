"""Pure decisions: findings to verdicts, verdicts to actions; no I/O, no clock."""
