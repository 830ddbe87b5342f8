"""Random programs of thirty kinds ("scenes"), as people write them, compared with plain PyTorch."""
