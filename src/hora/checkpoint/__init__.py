"""Checkpoints on disk: directories DIR/step-N that are complete or absent. Knows nothing of ranks and groups.

state_codec   nested state <-> plain data and named tensors
tensor_file   named tensors <-> the bytes of a safetensors file
manifest      the files of a checkpoint, their sizes and hashes; the names on disk
writer        save: write to a hidden directory, sync, rename; prune older checkpoints
reader        newest, find: a Checkpoint, verified before use
"""

from .reader import Checkpoint, find, newest
from .state_codec import decode, encode
from .tensor_file import parse
from .writer import save

__all__ = ["Checkpoint", "decode", "encode", "find", "newest", "parse", "save"]
