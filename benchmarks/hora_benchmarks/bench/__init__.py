"""Benchmarks: Hora against its peers, in one run, interleaved."""
