"""The workload graph: types, builder, verifier, text form, files and passes."""
