"""The coordinator: who takes part, who is alive, what they have agreed on. It carries no tensor bytes."""

from .client import Client
from .control import Control
from .local import LocalHub
from .messages import Event, Member
from .service import Service
from .state import Coordinator

__all__ = ["Client", "Control", "Coordinator", "Event", "LocalHub", "Member", "Service"]
