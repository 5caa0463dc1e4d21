"""The parts of benchmarks/soak.py."""
