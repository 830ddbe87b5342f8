"""Random programs of many kinds: what people write, in scenes, judged against plain PyTorch."""
