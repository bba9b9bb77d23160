"""Adaptation: measures, lets rank 0 plan, and switches all ranks at the same step."""
