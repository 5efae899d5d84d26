"""Prompt files and which prompts belong to which step."""
