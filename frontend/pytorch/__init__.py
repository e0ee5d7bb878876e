"""Captures one PyTorch training step without a GPU and without weights, and lowers it to a `StepGraph`.

    from echograph.frontend.pytorch.capture import capture, capture_mode
    from echograph.frontend.pytorch.lower import lower
    from echograph.frontend.pytorch.spec import StepSpec

    spec = StepSpec(dtype="bf16", clip_grad_norm=1.0)
    with capture_mode():
        module, inputs, loss = build()
    graph = lower(capture(module, inputs, loss, spec), spec, name="mine")

Importing this package imports nothing; its modules import torch.
"""
