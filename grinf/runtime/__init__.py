"""Control: the engine loop, the scheduler and the beam width policies. Knows no tensor."""
