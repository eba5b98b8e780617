"""swap-prune: prune trained PyTorch models with sparse entropic Wasserstein regression."""
