"""Central placement (work in progress)."""
