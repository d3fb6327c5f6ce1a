"""Conversations on disk: an SQLite file that survives a kill at any moment."""
