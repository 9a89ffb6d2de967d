"""Findings: texts that a replay did not confirm, and the feature that they have in common."""

from collections import Counter, deque
from collections.abc import Set

from text_generation_router.audit.served import FEATURES

ISOLATE_AFTER = 3
"""Findings that share a feature and nothing else after which that feature is switched off."""
COMMON = 4
"""Exponent of the share of the findings that used a feature: a feature that a third did not use is unlikely."""
USUAL = 0.5
"""A feature that more than this share of confirmed texts used is no explanation."""


class Findings:
    """Counts of the features of texts that were confirmed, and of those that were not."""

    def __init__(self) -> None:
        self._same = Counter[str]()
        self._different = Counter[str]()
        self._confirmed = self.total = 0
        self._last: deque[Set[str]] = deque(maxlen=ISOLATE_AFTER)

    def confirm(self, features: Set[str]) -> None:
        """Count a text that its replay confirmed."""
        self._same.update(features)
        self._confirmed += 1

    def add(self, features: Set[str]) -> str:
        """Count a finding; return the feature that it is likely due to, "none" if it used none.

        That is one that nearly all findings used, and few confirmed texts: see COMMON.
        """
        self._different.update(features)
        self.total += 1
        self._last.append(features)
        used = [name for name in FEATURES if name in features]
        share = {name: (self._different[name] / self.total) ** COMMON - self._usual(name) for name in used}
        return max(used, key=share.__getitem__, default="none")

    @property
    def shared(self) -> str | None:
        """The only unusual feature, or the replica, that the last ISOLATE_AFTER findings share; None if there is none."""
        if len(self._last) < ISOLATE_AFTER:
            return None
        common = [name for name in frozenset.intersection(*map(frozenset, self._last)) if self._usual(name) <= USUAL]
        return common[0] if len(common) == 1 else None

    def _usual(self, name: str) -> float:
        return (self._same[name] + 1) / (self._confirmed + 2)
