"""Adapters of model families, one file each."""
