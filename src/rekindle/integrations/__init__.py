"""Where people plug it in: one file a framework, each imported by its own name only."""
