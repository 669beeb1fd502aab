"""What a forked child does with the connections that it has inherited."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forgettable(Protocol):
    def forget(self) -> None:
        """In a forked child: closes the inherited descriptors."""


def forget_after_fork(owner: Forgettable) -> None:
    """Calls `owner.forget()` in every child that is forked while `owner` lives."""
    reference = weakref.ref(owner)

    def forget() -> None:
        found = reference()
        if found is not None:
            found.forget()

    os.register_at_fork(after_in_child=forget)
