"""What carries messages between shards."""
