"""Settings: what a user may set, where each value came from, and how it is spelled."""
