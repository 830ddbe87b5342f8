"""Integrations with training frameworks: one file for each framework, imported by its name only."""
