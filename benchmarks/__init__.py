"""Benchmarks: commands that write JSON."""
