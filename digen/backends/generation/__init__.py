"""Backends that sample images and videos."""
