"""State: requests, who owns which memory, and the pools that hold KV and paths."""
