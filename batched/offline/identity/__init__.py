"""Identity: hashes of rows and fingerprints of steps."""
