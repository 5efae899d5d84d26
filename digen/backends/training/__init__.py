"""Backends that compute gradients and step."""
