"""Generation and training backends: what runs inside the workers."""
