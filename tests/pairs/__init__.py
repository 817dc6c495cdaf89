"""Relations that must hold for every pair of features: see CONTRIBUTING.md, "Pairs of features"."""
