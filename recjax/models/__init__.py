"""The decoder and what it computes, on one device or on a mesh."""
