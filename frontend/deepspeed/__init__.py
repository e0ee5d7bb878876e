"""DeepSpeed scripts: what a capture of them needs (`shims`, `device`) and how DeepSpeed tells where it is (`adapter`)."""
