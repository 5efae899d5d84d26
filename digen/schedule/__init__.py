"""Pure scheduling: facts in, choice out."""
