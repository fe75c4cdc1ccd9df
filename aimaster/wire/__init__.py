"""Records that cross process borders: frozen structs, no I/O."""
