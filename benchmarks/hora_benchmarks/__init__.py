"""Hora's benchmarks against its peers (`bench`) and textbook claims put to the test (`claims`)."""
