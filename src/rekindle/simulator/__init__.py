"""Replays what a program did under any budget and any policy."""

from rekindle.simulator._replay import replay as replay
