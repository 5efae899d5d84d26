"""Rewards, one file each."""
