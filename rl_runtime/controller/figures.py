"""Figures of the run: what the pulse, the status and the metrics say in numbers. Pure; rates over the last half minute."""

from collections import deque
from collections.abc import Mapping

from aimaster.wire.ids import MemberId
from rl_runtime.controller.batches import Batch
from rl_runtime.controller.group import Group
from rl_runtime.controller.ledger import Ledger
from rl_runtime.controller.rollouts import Rollouts

WINDOW_SECONDS = 30.0


class Figures:
    """See the module."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._tokens: deque[tuple[float, int]] = deque()
        self._members: dict[MemberId, dict[str, float]] = {}
        self._batch: dict[str, float] = {}
        self.tokens = 0
        """Completion tokens admitted by this controller."""

    def note_tokens(self, tokens: int, now: float) -> None:
        """Completions with so many tokens were admitted."""
        self.tokens += tokens
        self._tokens.append((now, tokens))
        self._forget(now)

    def note_member(self, member: MemberId, figures: Mapping[str, float]) -> None:
        """A member said these of itself."""
        if figures:
            self._members[member] = dict(figures)

    def note_batch(self, batch: Batch) -> None:
        """This batch is being trained."""
        self._batch = {"reward_mean": batch.reward_mean, "staleness_mean": batch.staleness_mean}

    def tokens_per_second(self, now: float) -> float:
        """Completion tokens admitted a second, lately."""
        self._forget(now)
        seconds = max(1.0, min(WINDOW_SECONDS, now - self._began))
        return sum(tokens for _, tokens in self._tokens) / seconds

    def numbers(self, ledger: Ledger, group: Group, rollouts: Rollouts, now: float) -> dict[str, float]:
        """Return all figures by name."""
        account = ledger.account
        dealt_steps = len(account.batches) + len(account.past)
        return (
            self._averages()
            | self._batch
            | {
                "tokens_per_second": self.tokens_per_second(now),
                "buffered_groups": float(len(account.waiting)),
                "leased": float(len(rollouts.leases)),
                "admitted": float(account.admitted),
                "dealt": float(dealt_steps * group.settings.batch_samples),
                "trained": float(account.head.step * group.settings.batch_samples),
                "filtered": float(account.filtered * group.settings.n_generation),
                "duplicates_refused": float(rollouts.results["duplicate"]),
                "stale_refused": float(rollouts.results["stale"]),
                "leases_released": float(rollouts.leases.releases),
                "ledger_bytes": float(ledger.size_bytes),
                "ledger_fsync_seconds": ledger.fsync_seconds,
                "policy_members": float(len(account.epoch.members)),
            }
        )

    def _averages(self) -> dict[str, float]:
        gathered: dict[str, list[float]] = {}
        for figures in self._members.values():
            for name, value in figures.items():
                gathered.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in gathered.items()}

    def _forget(self, now: float) -> None:
        while self._tokens and self._tokens[0][0] < now - WINDOW_SECONDS:
            self._tokens.popleft()
