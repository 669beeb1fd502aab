"""The coordinator: who takes part, who is alive, what they have agreed on. It carries no tensor bytes."""

from .client import CoordinatorClient
from .connection import CoordinatorConnection
from .in_process import InProcessCoordinator
from .messages import CoordinatorEvent, Member
from .service import CoordinatorService
from .state import Coordinator

__all__ = [
    "Coordinator",
    "CoordinatorClient",
    "CoordinatorConnection",
    "CoordinatorEvent",
    "CoordinatorService",
    "InProcessCoordinator",
    "Member",
]
