"""Where worker processes run."""
