"""ONNX models as step graphs.

`model.read` parses a file and needs the `onnx` package alone; `compile.compile_onnx` runs what was read on fake
tensors under the PyTorch frontend's recorder, so an ONNX and a PyTorch model become graphs in the same words.
"""
