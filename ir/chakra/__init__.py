"""Chakra execution traces: messages, reader and importer, lowering and writer, checks and dry run."""
