"""Tells a generator that is being closed whether its loop was left by `break` or by an exception.

Python closes the iterator of a `for` loop the same way in both cases, and hides the exception meanwhile. But before an
exception unwinds a frame, a traceback points to the frame's current instruction; after a `break` there is none.
"""

from __future__ import annotations

import gc
import opcode
import sys
from types import FrameType, TracebackType

_YIELDS = {opcode.opmap[name] for name in ("YIELD_VALUE", "YIELD_FROM", "SEND", "RESUME") if name in opcode.opmap}
_DROPS = {opcode.opmap[name] for name in ("POP_TOP", "POP_ITER") if name in opcode.opmap}
_CO_GENERATOR = 0x20


def by_exception(closing: GeneratorExit) -> bool:
    """Call it in a generator that handles `closing`: whether an exception is unwinding the code that iterated it.
    Generators that wrap this one are closed first, and skipped here."""
    if closing.__context__ is not None:
        return True  # closed explicitly while an exception is handled
    frame: FrameType | None = sys._getframe(1).f_back
    while frame is not None:
        if not _has_raised(frame):
            return False
        if not _is_closed(frame):
            return True
        frame = frame.f_back
    return False


def _has_raised(frame: FrameType) -> bool:
    """Whether an exception unwinds this frame: a traceback points to its current instruction. An instruction that drops
    the iterator, for a `break` or a `return`, raises none, so the search is skipped."""
    if frame.f_code.co_code[frame.f_lasti] in _DROPS:
        return False
    return any(
        isinstance(trace, TracebackType) and trace.tb_frame is frame and trace.tb_lasti == frame.f_lasti
        for trace in gc.get_referrers(frame)
    )


def _is_closed(frame: FrameType) -> bool:
    """Whether this is a generator at a `yield`: what unwinds it is its own GeneratorExit."""
    code = frame.f_code
    return bool(code.co_flags & _CO_GENERATOR) and code.co_code[frame.f_lasti] in _YIELDS
