"""The coordinator: who takes part, who is alive, what they have agreed on. It carries no tensor bytes."""

from .client import CoordinatorClient
from .control import CoordinatorLine
from .in_process import LocalHub
from .messages import CoordinatorEvent, Member
from .service import CoordinatorService
from .state import Coordinator

__all__ = [
    "Coordinator",
    "CoordinatorClient",
    "CoordinatorEvent",
    "CoordinatorLine",
    "CoordinatorService",
    "LocalHub",
    "Member",
]
