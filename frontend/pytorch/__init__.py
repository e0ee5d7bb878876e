"""Captures one PyTorch training step without a GPU and without weights.

The public names are imported when they are asked for: importing this package does not import torch.
"""
