"""Vocabulary embedding and head."""
