"""What slots ask of shards and get, as messages. Below protections and the engine."""
