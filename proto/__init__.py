"""The wire formats and the modules generated from them."""
