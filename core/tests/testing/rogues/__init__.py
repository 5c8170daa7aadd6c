"""Strategies that are right but for one mistake each, one file per part of a strategy's life."""
