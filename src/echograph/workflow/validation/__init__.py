"""`echosim validate`: predictions held against a table of measured training steps."""
