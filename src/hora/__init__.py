"""Hora: one PyTorch training script, many processes and machines, any data-parallel architecture, chosen by one word."""

__version__ = "0.1.0"
