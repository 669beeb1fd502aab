"""Names: the variables by which a launcher tells a process who it is. They are never passed on to another run."""

from __future__ import annotations

NAMES = (
    "HORA_RUN",
    "HORA_ROLE",
    "HORA_RANK",
    "HORA_SIZE",
    "HORA_SERVERS",
    "HORA_JOINED",
    "HORA_LOCAL_RANK",
    "HORA_LOCAL_SIZE",
    "HORA_CONTROL",
    "HORA_TOKEN_FD",
    "HORA_STRATEGY",
    "HORA_TIMEOUT_S",
    "HORA_MAX_STEPS",
    "HORA_BIND",
    "HORA_SERVE",
    "HORA_WATCH",
    "HORA_PROGRESS",
    "HORA_TRACE",
    "HORA_PID",
    "HORA_SCRATCH",
    "HORA_HOST",
)
