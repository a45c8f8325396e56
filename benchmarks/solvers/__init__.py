"""The exact solver side by side with others; `benchmarks/run.py` is the command."""
