"""Continuous batching: many requests over one pool, each admitted as soon as its blocks are free."""
