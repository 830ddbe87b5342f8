"""Integrations with training frameworks: one file a framework, imported by its own name only."""
