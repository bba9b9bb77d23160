"""A folder for PYTHONPATH: ``hva run`` puts it there, and Python imports its ``sitecustomize``."""
