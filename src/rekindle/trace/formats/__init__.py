"""Traces in files: one file a format."""

from rekindle.trace.formats.checkmate import read_checkmate as read_checkmate
from rekindle.trace.formats.checkmate import write_checkmate as write_checkmate
