"""Files on the server: what is pushed, pulled, fetched, unpacked or imported from a disk."""
