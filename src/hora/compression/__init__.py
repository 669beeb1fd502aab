"""Gradient compression between hosts: codecs, and all-reduces of encoded vectors with error feedback."""
