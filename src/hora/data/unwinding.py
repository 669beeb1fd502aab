"""Unwinding: a generator that is closed finds out whether its loop was left by `break` or by an exception.

Python closes the iterator of a `for` loop the same way in both cases, and hides the exception while it does. But an
exception leaves a trace before it unwinds a frame: a traceback that points to the very instruction at which the frame
stands. A frame that stands at a `break` has none.
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
    """Called in a generator, as it handles `closing`: whether an exception is on its way through the code that
    iterated it. Generators that were wrapped around it are closed first and looked through."""
    if closing.__context__ is not None:
        return True  # closed by hand while one is being handled
    frame: FrameType | None = sys._getframe(1).f_back
    while frame is not None:
        if not _has_raised(frame):
            return False
        if not _is_closed(frame):
            return True
        frame = frame.f_back
    return False


def _has_raised(frame: FrameType) -> bool:
    """Whether an exception passes this frame: a traceback points to where it stands now. An instruction that drops its
    iterator, for a `break` or a `return`, raises none, so there is no need to search."""
    if frame.f_code.co_code[frame.f_lasti] in _DROPS:
        return False
    return any(
        isinstance(trace, TracebackType) and trace.tb_frame is frame and trace.tb_lasti == frame.f_lasti
        for trace in gc.get_referrers(frame)
    )


def _is_closed(frame: FrameType) -> bool:
    """Whether this is a generator that stands at a `yield`: what passes it is its own GeneratorExit."""
    code = frame.f_code
    return bool(code.co_flags & _CO_GENERATOR) and code.co_code[frame.f_lasti] in _YIELDS
