"""What the pages of this package share: how they look, conversations, and text that is safe."""
