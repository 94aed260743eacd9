"""Finding the setting in which a bundle writes fastest on one machine, never one slower than plain decoding."""
