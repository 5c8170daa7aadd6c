"""Strategies that train, refuse nothing, and are wrong in a number: each modelled on a defect some project has had."""
