"""How the payloads of one bucket are reduced over the ranks."""
