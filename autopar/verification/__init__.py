"""Parallel programs beside the plain module."""
