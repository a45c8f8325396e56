"""What all devices of a federation agree on (`manifest`), and what is for one of them only (`plans`)."""
