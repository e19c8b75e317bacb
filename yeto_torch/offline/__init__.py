"""The outer step without a syncer."""
