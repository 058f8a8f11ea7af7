"""Pictures before a model sees them: bytes to pixels to patches. The pure half: numpy and Pillow."""
