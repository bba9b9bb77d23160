"""A folder for the PYTHONPATH of programs that tests start: Python imports its ``sitecustomize``."""
