"""Device profiles (one JSON a device) and the datasheet facts that they are made from."""
