"""The guest room: names, flags, files and scripts of other trainers, and what they mean here."""
