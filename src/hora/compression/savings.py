"""Tally: what compression saved."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class CompressionSavings:
    """What this worker has sent between hosts, and what a ring would have sent of the same vectors as they were."""

    sent_bytes: int = 0
    plain_bytes: int = 0

    def words(self, wire: str, count: int, unit: str) -> str:
        """In a sentence, for each of so many units; nothing where nothing was sent."""
        if not self.plain_bytes or not count:
            return ""
        sent, plain = text(self.sent_bytes / count), text(self.plain_bytes / count)
        return f"wire={wire}: {sent} instead of {plain} per {unit} between hosts"


def text(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.1f} kB"
