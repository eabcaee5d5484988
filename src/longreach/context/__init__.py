"""Exact chunked execution of decoder layers over a token tree."""
