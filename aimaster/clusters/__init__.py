"""Where the engine's own programs (master and agents) are placed. One Protocol, one module for each engine."""
