"""Reinforcement learning algorithms: one short file each, composed of noise, steps, advantage and loss."""
