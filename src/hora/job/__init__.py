"""Job: the user's handle on the run, made by `hora.init()`."""

from .job import Job, current
from .startup import init

__all__ = ["Job", "current", "init"]
