"""The benchmark: the highest request rate whose latency stays inside an SLA, with all raw data behind it."""
