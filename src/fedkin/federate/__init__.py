"""Where a problem is solved: shards of devices, and what carries their messages."""
