"""The engine: from gradient hooks to reduced gradients."""
