"""Merge of two attention results over disjoint sets of keys."""
