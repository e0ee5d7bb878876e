"""Traces of collectives: the records of a file, who reads them, and the operations that they name."""
