"""How the problem is solved, on arrays."""
