"""DeepSpeed scripts: what a capture of them needs (`shims`, `device`), what tells where they are (`adapter`)."""
