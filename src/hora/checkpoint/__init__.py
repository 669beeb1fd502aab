"""Checkpoints on disk: directories DIR/step-N that are whole or not there. Ranks and groups are not known here.

tree        any nest of state -> plain data and named tensors, and back
tensorfile  named tensors -> the bytes of a safetensors file, and back
manifest    which files make a checkpoint, their sizes and hashes
writer      save: written aside, synced, renamed; older ones are pruned
reader      newest, Checkpoint: verified before anything of it is used
"""

from .reader import Checkpoint, find, newest
from .tensorfile import parse
from .tree import decode, encode
from .writer import save

__all__ = ["Checkpoint", "decode", "encode", "find", "newest", "parse", "save"]
