"""The decoder and its computations, on one device or on a mesh."""
